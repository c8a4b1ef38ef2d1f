"""Publish vLLM's Prometheus metrics on Triton's metrics endpoint.

vLLM keeps them in a registry of this process; a thread copies what has changed once a second, so the token path pays
nothing and metrics that a new vLLM adds appear by themselves.

A histogram is published as its Prometheus samples (`…_bucket{le=…}`, `…_sum`, `…_count`), each a counter: Triton's own
histogram kind takes one observation a call, a round trip to the server each, which is too slow for what vLLM observes
per token and could not give an exact sum. Scrapers and queries (`histogram_quantile`) see the same lines.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from triton_vllm.protocols import Metric, PrometheusFamily

PREFIX = "vllm:"
PERIOD_S = 1.0


@dataclass(frozen=True)
class Sample:
    """One line of the exposition: a value that only grows (counter) or moves freely (gauge)."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float
    counter: bool
    help: str


class Sink(Protocol):
    """Where samples go; `Triton`'s metric families in the server."""

    def create(self, sample: Sample, labels: Mapping[str, str]) -> Metric:
        """Return a new metric, at zero, for the sample's name and these labels."""

    def add(self, metric: Metric, amount: float) -> None:
        """Raise a counter."""

    def set(self, metric: Metric, value: float) -> None:
        """Set a gauge."""

    def clear(self) -> None:
        """Drop what `create` has kept; called once nothing else holds a metric."""


def samples(families: Iterable[PrometheusFamily]) -> list[Sample]:
    """Flatten the families of a Prometheus registry whose names start with `vllm:`."""
    found = []
    for family in families:
        if not family.name.startswith(PREFIX):
            continue
        counter = family.type in ("counter", "histogram", "summary")
        for sample in family.samples:
            if sample.name.endswith("_created"):  # a time stamp that vLLM's own endpoint has beside each counter
                continue
            labels = tuple(sorted((k, str(v)) for k, v in sample.labels.items()))
            found.append(Sample(sample.name, labels, float(sample.value), counter, family.documentation))
    return found


class Mirror:
    """Keep the metrics of a sink equal to samples.

    Args:
        sink: makes and moves metrics.
        labels: put on each metric besides vLLM's own (model, version).
        others: whether other processes set the same gauges, so that one which has not changed is set as well.
    """

    def __init__(self, sink: Sink, labels: Mapping[str, str], *, others: bool = False) -> None:
        self._others = others
        self._sink = sink
        self._labels = labels
        self._metrics: dict[tuple[str, tuple[tuple[str, str], ...]], Metric] = {}
        self._last: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def skip(self, current: Iterable[Sample]) -> None:
        """Leave out what counters have counted so far; call it before the first update."""
        self._last.update({(sample.name, sample.labels): sample.value for sample in current if sample.counter})

    def update(self, current: Iterable[Sample]) -> None:
        """Send every change since the last call; a counter that has fallen was restarted and counts on from there."""
        for sample in current:
            key = (sample.name, sample.labels)
            if key not in self._metrics:
                self._metrics[key] = self._sink.create(sample, {**dict(sample.labels), **self._labels})
                self._last.setdefault(key, 0.0)
            last = self._last[key]
            again = self._others and not sample.counter
            if (sample.value == last and not again) or math.isnan(sample.value):
                continue
            if sample.counter:
                self._sink.add(self._metrics[key], sample.value - last if sample.value > last else sample.value)
            else:
                self._sink.set(self._metrics[key], sample.value)
            self._last[key] = sample.value

    def clear(self) -> None:
        """Drop every metric, which removes it from the server."""
        self._metrics.clear()
        self._sink.clear()


class Publisher:
    """Run a mirror once a second until closed, with what is counted from now on.

    Args:
        mirror: what to update.
        collect: returns the families of vLLM's registry.
        report: logs the first failure; a metric that cannot be published must not stop the others.
    """

    def __init__(self, mirror: Mirror, collect: Callable[[], Iterable[PrometheusFamily]], report: Callable[[str], None]) -> None:
        self._mirror = mirror
        self._collect = collect
        self._report = report
        self._failed = False
        self._end = threading.Event()
        # So far the engine has sampled a token ahead, which is no client's.
        self._try(mirror.skip)
        self._thread = threading.Thread(target=self._run, name="triton-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publish the last values, end the thread and remove the metrics from the server."""
        self._end.set()
        self._thread.join()
        self._mirror.clear()

    def _run(self) -> None:
        while True:
            ended = self._end.wait(PERIOD_S)
            self._try(self._mirror.update)
            if ended:
                return

    def _try(self, take: Callable[[Iterable[Sample]], None]) -> None:
        try:
            take(samples(self._collect()))
        except Exception as error:  # noqa: BLE001 - see the class
            if not self._failed:
                self._failed = True
                self._report(f"metrics not published: {type(error).__name__}: {error}")
