"""Publish vLLM's Prometheus metrics on Triton's metrics endpoint.

vLLM keeps its metrics in a registry of this process. A thread copies the changes once a second.
With the official backend's behaviour it does so 20 times a second, because its clients look right
after an answer. So the token path pays nothing, and metrics that a new vLLM adds appear without a
change here.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from triton_vllm.base.dialect import OURS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from triton_vllm.base.dialect import Dialect
    from triton_vllm.base.protocols import Metric, PrometheusFamily
    from triton_vllm.base.triton import TritonMetrics
    from triton_vllm.metrics.claim import Claim

PREFIXES = ("vllm:", "vllm_env_")
"""What the names of published families begin with: vLLM's and ours."""
SHARE_OF_TIME = 0.05
"""The share of the time for calls to the server.

Each call is a round trip, and one observation changes up to 20 samples.
"""
LONGEST_PAUSE_S = 2.0
"""The longest pause between two updates, s; scrapers read every few seconds."""
# Keeps mirrors until the process ends, so that the server keeps their metrics. The process does not
# take its objects apart (`startup.interpreter.end_at_once`).
_kept: list[Mirror] = []
Key = tuple[str, tuple[tuple[str, str], ...]]
"""A sample's name and labels."""


@dataclass(frozen=True)
class Sample:
    """One line of the exposition: a value that only grows (counter) or moves freely (gauge).

    Attributes:
        key: the name and the labels in vLLM's registry.
        value: the current value.
        counter: whether the value only grows.
        help: the description. May be empty.
    """

    key: Key
    value: float
    counter: bool
    help: str


def samples(families: Iterable[PrometheusFamily]) -> list[Sample]:
    """Return the samples of those families of a registry that are vLLM's or ours."""
    # A list: all samples are taken before the first is sent. Sending takes long, and an error while
    # they are taken must not publish a part of them.
    found = []
    for family in families:
        if not family.name.startswith(PREFIXES):
            continue
        # In these three kinds, every sample only grows: a histogram's are its buckets, sum and
        # count. Triton's own histogram takes one observation per call, and no counts. So 256
        # streams at 40 tokens/s would make 10,000 calls a second.
        counter = family.type in ("counter", "histogram", "summary")
        for sample in family.samples:
            # prometheus_client adds this time stamp for each counter.
            if sample.name.endswith("_created"):
                continue
            labels = tuple(sorted((name, str(value)) for name, value in sample.labels.items()))
            key = (sample.name, labels)
            value = float(sample.value)
            found.append(Sample(key, value, counter=counter, help=family.documentation))
    return found


class Mirror:
    """Keeps the metrics of a sink equal to samples.

    Args:
        sink: makes and changes metrics in the server.
        labels: added to each metric's own labels (model, version).
        dialect: determines which of vLLM's metrics are published, and with which of its labels.
        others: whether other processes set the same gauges. Then unchanged gauges are set as well.
        model_name: replaces the value of vLLM's label of this name; "" leaves it.

    Attributes:
        period: seconds between two updates.
    """

    def __init__(
        self,
        sink: TritonMetrics,
        labels: Mapping[str, str],
        *,
        dialect: Dialect = OURS,
        others: bool = False,
        model_name: str = "",
    ) -> None:
        self.period = dialect.metrics_period_s
        self._others = others
        self._sink = sink
        self._labels = labels
        self._model_name = model_name
        self._dialect = dialect
        # The metric in the server, and the last value that was sent, of each sample.
        self._metrics: dict[Key, Metric] = {}
        self._last: dict[Key, float] = {}

    def skip(self, families: Iterable[PrometheusFamily]) -> None:
        """Ignore the counters' values so far; call it before the first update."""
        for sample in samples(families):
            if sample.counter:
                self._last[sample.key] = sample.value

    def follow(self, families: Iterable[PrometheusFamily]) -> None:
        """Send every change since the last call."""
        for sample in samples(families):
            name, labels = sample.key
            published_name = self._dialect.metric_name(name, dict(labels))
            if published_name is not None:
                # Made even if there is no change to send: the server then shows it with 0.
                metric = self._metric_of(sample, published_name, dict(labels))
                self._send_change(sample, metric)

    def _metric_of(self, sample: Sample, name: str, own_labels: Mapping[str, str]) -> Metric:
        """Return the sample's metric in the server, which is made if there is none yet."""
        if sample.key not in self._metrics:
            labels = {**self._dialect.metric_labels(own_labels), **self._labels}
            if self._model_name and "model_name" in labels:
                labels["model_name"] = self._model_name
            self._metrics[sample.key] = self._sink.create(
                name, sample.help or name, labels, counter=sample.counter
            )
        return self._metrics[sample.key]

    def _send_change(self, sample: Sample, metric: Metric) -> None:
        """Set a gauge, or add to a counter what has been counted since the last call."""
        # From `skip`, if there was no call before this one.
        last = self._last.get(sample.key, 0.0)
        # Another front end of the engine may have set the gauge meanwhile, to an older value. So an
        # unchanged gauge is sent, too.
        send_unchanged = self._others and not sample.counter
        if (sample.value == last and not send_unchanged) or math.isnan(sample.value):
            return
        if not sample.counter:
            self._sink.set(metric, sample.value)
        elif sample.value > last:
            self._sink.add(metric, sample.value - last)
        else:
            # A counter that has fallen was restarted with its engine, and counts from 0.
            self._sink.add(metric, sample.value)
        self._last[sample.key] = sample.value

    def clear(self) -> None:
        """Drop every metric, which removes it from the server."""
        self._metrics.clear()
        self._sink.clear()


def pause_after(update_s: float, period_s: float) -> float:
    """Return how many seconds to wait after an update that took ``update_s`` seconds."""
    return min(max(period_s, update_s / SHARE_OF_TIME), LONGEST_PAUSE_S)


class Publisher:
    """Runs a mirror until it is closed: at once, and after each of its periods.

    Args:
        mirror: the mirror to update.
        collect: returns the families of vLLM's registry.
        report: logs the first failure.
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
        # The engine has already sampled a token ahead, which belongs to no client. So counts before
        # this moment are not published.
        self._pass_families(mirror.skip)
        self._thread = threading.Thread(target=self._run, name="triton-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publish the last values, end the thread and remove this model's metrics."""
        self._end.set()
        self._thread.join()
        # If other instances share the metrics, the server would remove them for all, and crash when
        # another instance raises one.
        if self._claim.shared:
            _kept.append(self._mirror)
        else:
            self._mirror.clear()
        self._claim.give_up()

    def _run(self) -> None:
        """Publish until ``close`` is called, and once more then."""
        ended = False
        while not ended:
            begun = time.monotonic()
            self._pass_families(self._follow)
            ended = self._end.wait(pause_after(time.monotonic() - begun, self._mirror.period))
        self._pass_families(self._follow)

    def _follow(self, families: Iterable[PrometheusFamily]) -> None:
        if self._claim.take():
            self._mirror.follow(families)

    def _pass_families(self, take: Callable[[Iterable[PrometheusFamily]], None]) -> None:
        """Call ``take`` with the present families; log the first error, and ignore it."""
        try:
            take(self._collect())
        # A metric that cannot be published must not stop the others, nor the model.
        except Exception as error:  # noqa: BLE001
            if not self._failed:
                self._failed = True
                self._report(f"metrics not published: {type(error).__name__}: {error}")
