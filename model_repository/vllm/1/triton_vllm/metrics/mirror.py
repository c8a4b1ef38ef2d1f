"""Publish vLLM's Prometheus metrics on Triton's metrics endpoint.

vLLM keeps its metrics in a registry of this process. A thread copies the changes once a second. With
the official backend's behaviour it does so 20 times a second, because its clients look right after an
answer. So the token path pays nothing, and metrics that a new vLLM adds appear without a change here.

A histogram's samples (`…_bucket{le=…}`, `…_sum`, `…_count`) are published as counters. Triton's own
histogram takes one observation per call, and no counts: 256 streams at 40 tokens/s would make
10,000 calls a second.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from triton_vllm.base.dialect import OURS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from triton_vllm.base.dialect import Dialect
    from triton_vllm.base.protocols import Metric, PrometheusFamily

PREFIX = "vllm:"
SHARE = 0.05
"""The share of the time for calls to the server. Each call is a round trip; one observation changes up to 20 samples."""
LONGEST_PAUSE_S = 2.0
"""The longest pause between two updates, s; scrapers read every few seconds."""
_kept: list[Mirror] = []
"""Keeps mirrors until the process ends. The process does not take its objects apart (`startup.interpreter.end_at_once`)."""


@dataclass(frozen=True)
class Sample:
    """One line of the exposition: a value that only grows (counter) or moves freely (gauge)."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float
    counter: bool
    help: str


class Sink(Protocol):
    """The destination of samples; in the server it is `Triton`'s metric families."""

    def create(
        self, name: str, description: str, labels: Mapping[str, str], *, counter: bool
    ) -> Metric:
        """Return a new metric at zero, a counter or a gauge."""

    def add(self, metric: Metric, amount: float) -> None:
        """Raise a counter."""

    def set(self, metric: Metric, value: float) -> None:
        """Set a gauge."""

    def clear(self) -> None:
        """Drop the metrics that `create` has kept; called when no other object holds a metric."""


class Claim(Protocol):
    """The right to a model's metrics in the server (`metrics.claim`).

    Attributes:
        shared: whether other processes may have it, too. The metrics then stay at the end.
    """

    shared: bool

    def take(self) -> bool:
        """Return whether this process has the claim now."""

    def give_up(self) -> None:
        """Free the claim for the next process."""


def samples(families: Iterable[PrometheusFamily]) -> list[Sample]:
    """Flatten the families of a Prometheus registry whose names start with `vllm:`."""
    found = []
    for family in families:
        if not family.name.startswith(PREFIX):
            continue
        # In these three kinds, every sample only grows.
        counter = family.type in ("counter", "histogram", "summary")
        for sample in family.samples:
            if sample.name.endswith(
                "_created"
            ):  # a time stamp that prometheus_client adds for each counter
                continue
            labels = tuple(sorted((name, str(value)) for name, value in sample.labels.items()))
            found.append(
                Sample(sample.name, labels, float(sample.value), counter, family.documentation)
            )
    return found


class Mirror:
    """Keeps the metrics of a sink equal to samples.

    Args:
        sink: makes and changes metrics.
        labels: added to each metric's own labels (model, version).
        dialect: determines which of vLLM's metrics are published, and with which of its labels.
        others: whether other processes set the same gauges. Then unchanged gauges are set as well.

    Attributes:
        period: seconds between two updates.
    """

    def __init__(
        self,
        sink: Sink,
        labels: Mapping[str, str],
        *,
        dialect: Dialect = OURS,
        others: bool = False,
    ) -> None:
        self.period = dialect.metrics_period_s
        self._others = others
        self._sink = sink
        self._labels = labels
        self._dialect = dialect
        self._metrics: dict[tuple[str, tuple[tuple[str, str], ...]], Metric] = {}
        self._last: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def skip(self, families: Iterable[PrometheusFamily]) -> None:
        """Ignore the counters' values so far; call it before the first update."""
        for sample in samples(families):
            if sample.counter:
                self._last[sample.name, sample.labels] = sample.value

    def follow(self, families: Iterable[PrometheusFamily]) -> None:
        """Send every change since the last call. A counter that has fallen was restarted, and its new value is added."""
        for sample in samples(families):
            name = self._dialect.metric_name(sample.name, dict(sample.labels))
            if name is not None:
                self._move(sample, name)

    def _move(self, sample: Sample, name: str) -> None:
        key = (sample.name, sample.labels)
        if key not in self._metrics:
            labels = {**self._dialect.metric_labels(dict(sample.labels)), **self._labels}
            self._metrics[key] = self._sink.create(
                name, sample.help or name, labels, counter=sample.counter
            )
            # `skip` may have set another start.
            self._last.setdefault(key, 0.0)
        last = self._last[key]
        again = self._others and not sample.counter
        if (sample.value == last and not again) or math.isnan(sample.value):
            return
        if sample.counter:
            self._sink.add(
                self._metrics[key], sample.value - last if sample.value > last else sample.value
            )
        else:
            self._sink.set(self._metrics[key], sample.value)
        self._last[key] = sample.value

    def clear(self) -> None:
        """Drop every metric, which removes it from the server."""
        self._metrics.clear()
        self._sink.clear()


def pause_after(update_s: float, period_s: float) -> float:
    """Return how many seconds to wait after an update that took `update_s`."""
    return min(max(period_s, update_s / SHARE), LONGEST_PAUSE_S)


class Publisher:
    """Runs a mirror until it is closed: at once, and after each of its periods. Counts before its start are not published.

    Args:
        mirror: the mirror to update.
        collect: returns the families of vLLM's registry.
        report: logs the first failure. A metric that cannot be published must not stop the others.
        claim: no metric is made before this process has it. The counts until then are published
            afterwards.
    """

    def __init__(
        self,
        mirror: Mirror,
        collect: Callable[[], Iterable[PrometheusFamily]],
        report: Callable[[str], None],
        claim: Claim,
    ) -> None:
        self._mirror = mirror
        self._claim = claim
        self._collect = collect
        self._report = report
        self._failed = False
        self._end = threading.Event()
        # The engine has already sampled a token ahead, which belongs to no client.
        self._try(mirror.skip)
        self._thread = threading.Thread(target=self._run, name="triton-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publish the last values, end the thread and remove the metrics, unless other instances share them."""
        self._end.set()
        self._thread.join()
        if self._claim.shared:
            _kept.append(self._mirror)
        else:
            self._mirror.clear()
        self._claim.give_up()

    def _run(self) -> None:
        ended = False
        while not ended:
            begun = time.monotonic()
            self._try(self._follow)
            ended = self._end.wait(pause_after(time.monotonic() - begun, self._mirror.period))
        self._try(self._follow)

    def _follow(self, families: Iterable[PrometheusFamily]) -> None:
        if self._claim.take():
            self._mirror.follow(families)

    def _try(self, take: Callable[[Iterable[PrometheusFamily]], None]) -> None:
        try:
            take(self._collect())
        except Exception as error:  # noqa: BLE001 - see the class
            if not self._failed:
                self._failed = True
                self._report(f"metrics not published: {type(error).__name__}: {error}")
