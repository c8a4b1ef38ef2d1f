"""Publish vLLM's Prometheus metrics on Triton's metrics endpoint.

vLLM keeps them in a registry of this process; a thread copies what has changed once a second (twenty times as the official
backend, whose clients look right after an answer), so the token path pays nothing and metrics that a new vLLM adds appear by
themselves. Histograms become Triton's own, where it has them (24.09): `histogram` says what is observed. An older Triton
shows their samples (`…_bucket{le=…}`, `…_sum`, `…_count`) as counters.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from triton_vllm import official
from triton_vllm.histogram import Histogram, Replay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from triton_vllm.protocols import Metric, PrometheusFamily, PrometheusSample

PREFIX = "vllm:"
PERIOD_S = 1.0
OFFICIAL_PERIOD_S = 0.05
_kept: list[Mirror] = []
"""Until the process ends, which it does without taking its objects apart (`loading.interpreter.end_at_once`)."""


@dataclass(frozen=True)
class Sample:
    """One line of the exposition: a value that only grows (counter) or moves freely (gauge)."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float
    counter: bool
    help: str


class Sink(Protocol):
    """Where samples go; `Triton`'s metric families in the server.

    Attributes:
        histograms: whether it has them.
    """

    histograms: bool

    def create(self, sample: Sample, labels: Mapping[str, str]) -> Metric:
        """Return a new metric, at zero, for the sample's name and these labels."""

    def create_histogram(self, histogram: Histogram, labels: Mapping[str, str]) -> Metric:
        """Return a new histogram without observations, with the same name and bounds, and these labels."""

    def add(self, metric: Metric, amount: float) -> None:
        """Raise a counter."""

    def observe(self, metric: Metric, value: float) -> None:
        """Add an observation to a histogram."""

    def set(self, metric: Metric, value: float) -> None:
        """Set a gauge."""

    def clear(self) -> None:
        """Drop what `create` has kept; called once nothing else holds a metric."""


class Claim(Protocol):
    """The right to a model's metrics in the server (`loading.claim`).

    Attributes:
        shared: whether other processes may have it, too; then the metrics stay.
    """

    shared: bool

    def take(self) -> bool:
        """Return whether it is this process's now."""

    def give_up(self) -> None:
        """Leave it to the next."""


def samples(families: Iterable[PrometheusFamily], *, histograms: bool = False) -> list[Sample | Histogram]:
    """Flatten the families of a Prometheus registry whose names start with `vllm:`, all but histograms that are asked for."""
    found: list[Sample | Histogram] = []
    for family in families:
        if not family.name.startswith(PREFIX):
            continue
        if histograms and family.type == "histogram":
            found += _histograms(family)
            continue
        counter = family.type in ("counter", "histogram", "summary")
        for sample in family.samples:
            if sample.name.endswith("_created"):  # a time stamp that vLLM's own endpoint has beside each counter
                continue
            found.append(Sample(sample.name, _labels(sample), float(sample.value), counter, family.documentation))
    return found


def _labels(sample: PrometheusSample) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((k, str(v)) for k, v in sample.labels.items()))


def _histograms(family: PrometheusFamily) -> list[Histogram]:
    """Return a family's histograms, one for each set of labels."""
    totals: dict[tuple[tuple[str, str], ...], float] = {}
    buckets: dict[tuple[tuple[str, str], ...], list[tuple[float, int]]] = {}
    for sample in family.samples:
        labels = tuple(pair for pair in _labels(sample) if pair[0] != "le")
        if sample.name.endswith("_sum"):
            totals[labels] = float(sample.value)
        elif sample.name.endswith("_bucket"):
            buckets.setdefault(labels, []).append((float(str(sample.labels["le"])), int(sample.value)))
    found = []
    for labels, pairs in buckets.items():
        bounds, ends = zip(*sorted(pairs), strict=True)
        counts = tuple(max(end - begin, 0) for begin, end in zip((0, *ends[:-1]), ends, strict=True))
        found.append(Histogram(family.name, labels, bounds[:-1], counts, totals.get(labels, 0.0), family.documentation))
    return found


class Mirror:
    """Keep the metrics of a sink equal to samples.

    Args:
        sink: makes and moves metrics.
        labels: put on each metric besides vLLM's own (model, version).
        as_official: whether to keep to the official backend's metrics, with no other labels than these.
        others: whether other processes set the same gauges, so that one which has not changed is set as well.

    Attributes:
        period: seconds between two updates.
    """

    def __init__(self, sink: Sink, labels: Mapping[str, str], *, as_official: bool = False, others: bool = False) -> None:
        self.period = OFFICIAL_PERIOD_S if as_official else PERIOD_S
        self._others = others
        self._sink = sink
        self._labels = labels
        self._as_official = as_official
        self._metrics: dict[tuple[str, tuple[tuple[str, str], ...]], Metric] = {}
        self._last: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._replays: dict[tuple[str, tuple[tuple[str, str], ...]], Replay] = {}

    def skip(self, families: Iterable[PrometheusFamily]) -> None:
        """Leave out what counters and histograms have counted so far; call it before the first update."""
        for sample in samples(families, histograms=self._sink.histograms):
            key = (sample.name, sample.labels)
            if isinstance(sample, Histogram):
                self._replays[key] = Replay(self.period)
                self._replays[key].take(sample)
            elif sample.counter:
                self._last[key] = sample.value

    def follow(self, families: Iterable[PrometheusFamily]) -> None:
        """Send every change of a registry's families since the last call."""
        self.update(samples(families, histograms=self._sink.histograms))

    def update(self, current: Iterable[Sample | Histogram]) -> None:
        """Send every change since the last call; a counter that has fallen was restarted and counts on from there."""
        for sample in current:
            if isinstance(sample, Histogram):
                self._replay(sample)
            else:
                self._move(sample)

    def _move(self, sample: Sample) -> None:
        if self._as_official and sample.name not in official.COUNTERS:
            return
        key = (sample.name, sample.labels)
        if key not in self._metrics:
            self._metrics[key] = self._sink.create(sample, self._all_labels(sample))
            self._last.setdefault(key, 0.0)
        last = self._last[key]
        again = self._others and not sample.counter
        if (sample.value == last and not again) or math.isnan(sample.value):
            return
        if sample.counter:
            self._sink.add(self._metrics[key], sample.value - last if sample.value > last else sample.value)
        else:
            self._sink.set(self._metrics[key], sample.value)
        self._last[key] = sample.value

    def _replay(self, now: Histogram) -> None:
        key = (now.name, now.labels)
        if key not in self._metrics:
            made = self._as_published(now)
            if made is None:
                return
            self._metrics[key] = self._sink.create_histogram(made, self._all_labels(now))
            self._replays.setdefault(key, Replay(self.period))
        for value in self._replays[key].take(now):
            self._sink.observe(self._metrics[key], value)

    def _as_published(self, now: Histogram) -> Histogram | None:
        if not self._as_official:
            return now
        if now.name not in official.HISTOGRAMS:
            return None
        name, bounds = official.HISTOGRAMS[now.name]
        return replace(now, name=name, bounds=bounds or now.bounds)

    def _all_labels(self, sample: Sample | Histogram) -> dict[str, str]:
        return dict(self._labels) if self._as_official else {**dict(sample.labels), **self._labels}

    def clear(self) -> None:
        """Drop every metric, which removes it from the server."""
        self._metrics.clear()
        self._sink.clear()


class Publisher:
    """Run a mirror until closed, at once and after each of its periods, with what is counted from now on.

    Args:
        mirror: what to update.
        collect: returns the families of vLLM's registry.
        report: logs the first failure; a metric that cannot be published must not stop the others.
        claim: no metric is made before it is this process's; what is counted until then is published then.
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
        # So far the engine has sampled a token ahead, which is no client's.
        self._try(mirror.skip)
        self._thread = threading.Thread(target=self._run, name="triton-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publish the last values, end the thread and remove the metrics from the server, unless they are others', too."""
        self._end.set()
        self._thread.join()
        if self._claim.shared:
            _kept.append(self._mirror)
        else:
            self._mirror.clear()
        self._claim.give_up()

    def _run(self) -> None:
        self._try(self._follow)
        ended = False
        while not ended:
            ended = self._end.wait(self._mirror.period)
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
