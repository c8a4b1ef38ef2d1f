"""vLLM's Prometheus metrics are mirrored exactly: same sample names, values and histogram buckets."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from support.patience import LIMIT
from triton_vllm.base.dialect import OFFICIAL, OURS
from triton_vllm.metrics.mirror import Mirror, Publisher


def family(name, kind, *lines):
    made = [SimpleNamespace(name=n, labels=labels, value=v) for n, labels, v in lines]
    return SimpleNamespace(name=name, type=kind, documentation=f"help of {name}", samples=made)


class Sink:
    """Remembers values as the server would."""

    def __init__(self):
        self.values = {}
        self.calls = 0
        self.cleared = False

    def create(self, name, description, labels, *, counter):
        key = (name, tuple(sorted(labels.items())))
        self.values[key] = 0.0
        return key

    def add(self, metric, amount):
        assert amount > 0
        self.calls += 1
        self.values[metric] += amount

    def set(self, metric, value):
        self.calls += 1
        self.values[metric] = value

    def clear(self):
        self.cleared = True


class Claim:
    """A claim that can be had at the look of that number."""

    def __init__(self, *, shared=False, at=1):
        self.shared = shared
        self.waits = at
        self.given_up = False

    def take(self):
        self.waits -= 1
        return self.waits <= 0

    def give_up(self):
        self.given_up = True


def registry(tokens, running, buckets):
    return [
        family("vllm:tokens", "counter", ("vllm:tokens_total", {}, tokens), ("vllm:tokens_created", {}, 1e9)),
        family("vllm:running", "gauge", ("vllm:running", {"engine": "0"}, running)),
        family(
            "vllm:ttft",
            "histogram",
            *[("vllm:ttft_bucket", {"le": le}, v) for le, v in zip(("0.1", "+Inf"), buckets, strict=True)],
            ("vllm:ttft_count", {}, buckets[-1]),
            ("vllm:ttft_sum", {}, buckets[-1] / 8),
        ),
        family("python_gc", "counter", ("python_gc_total", {}, 7)),
    ]


def value(sink, name, **labels):
    return sink.values[name, tuple(sorted({"model": "m", **labels}.items()))]


def test_values_follow_the_registry():
    """Counters, gauges, buckets, count and sum are equal after every update; others' metrics and stamps stay out."""
    sink = Sink()
    mirror = Mirror(sink, {"model": "m"})
    for tokens, running, buckets in ((5, 2, (1, 3)), (9, 0, (4, 8))):
        mirror.follow(registry(tokens, running, buckets))
        assert value(sink, "vllm:tokens_total") == tokens
        assert value(sink, "vllm:running", engine="0") == running
        assert value(sink, "vllm:ttft_bucket", le="0.1") == buckets[0]
        assert value(sink, "vllm:ttft_bucket", le="+Inf") == buckets[1]
        assert value(sink, "vllm:ttft_count") == buckets[1]
        assert value(sink, "vllm:ttft_sum") == buckets[1] / 8
    assert len(sink.values) == 6


@pytest.mark.parametrize(("dialect", "expected"), [(OURS, {"model_name": "opt", "engine": "0"}), (OFFICIAL, {})])
def test_the_label_of_the_weights_has_the_models_name(dialect, expected):
    """In place of a path; the official backend has no label of vLLM's, and gets none. Without a name vLLM's stays."""
    for name, shown in (("opt", expected), ("", expected | ({"model_name": "/weights"} if expected else {}))):
        labels = {"model_name": "/weights", "engine": "0"}
        tokens = family("vllm:prompt_tokens", "counter", ("vllm:prompt_tokens_total", labels, 5))
        sink = Sink()
        Mirror(sink, {"model": "m"}, dialect=dialect, model_name=name).follow([tokens])
        assert value(sink, "vllm:prompt_tokens_total", **shown) == 5


def test_a_gauge_that_others_set_as_well_is_set_again():
    """What another front end of the engine has said last would stay; counters are added up."""
    sink = Sink()
    mirrors = [Mirror(sink, {"model": "m"}, others=True) for _ in range(2)]
    for mirror, running in zip((*mirrors, mirrors[0]), (0, 5, 0), strict=True):
        mirror.follow(registry(5, running, (1, 3)))
    assert value(sink, "vllm:running", engine="0") == 0


def test_a_restarted_counter_counts_on():
    """After an engine restart vLLM counts from zero again; what is published never falls."""
    sink = Sink()
    mirror = Mirror(sink, {"model": "m"})
    for tokens in (10, 4):
        mirror.follow(registry(tokens, 0, (1, 1)))
    assert value(sink, "vllm:tokens_total") == 14


def test_what_was_counted_before_the_first_request_is_not_published():
    """The engine samples a token while the model is loaded; a gauge says what is, whenever that began."""
    sink = Sink()
    mirror = Mirror(sink, {"model": "m"})
    mirror.skip(registry(1, 2, (1, 1)))
    mirror.follow(registry(1, 2, (1, 1)))
    assert value(sink, "vllm:tokens_total") == 0
    assert value(sink, "vllm:running", engine="0") == 2
    mirror.follow(registry(5, 2, (1, 3)))
    assert value(sink, "vllm:tokens_total") == 4
    assert value(sink, "vllm:ttft_bucket", le="+Inf") == 2
    assert value(sink, "vllm:ttft_sum") == 2 / 8


def test_the_publisher_publishes_last_values_on_close_and_survives_errors():
    """A short-lived model's metrics are complete, and one failure does not end the thread."""
    sink, seen = Sink(), threading.Semaphore(0)
    reports: list[Any] = []
    counted = iter((registry(2, 1, (1, 1)), OSError("gone")))

    def collect():
        seen.release()
        found = next(counted, None)
        if isinstance(found, OSError):
            raise found
        return found or registry(5, 1, (1, 1))

    publisher = Publisher(Mirror(sink, {"model": "m"}), collect, reports.append, Claim())
    for _ in range(2):
        assert seen.acquire(timeout=LIMIT)
    publisher.close()
    assert value(sink, "vllm:tokens_total") == 3
    assert sink.cleared
    assert len(reports) == 1


@pytest.mark.parametrize("shared", [False, True])
def test_metrics_that_other_processes_publish_as_well_stay(shared):
    """The server would take them away from the others, too, and crash when one of them is raised."""
    sink, claim = Sink(), Claim(shared=shared)
    Publisher(Mirror(sink, {"model": "m"}), lambda: registry(3, 1, (1, 1)), print, claim).close()
    assert sink.cleared is not shared
    assert claim.given_up


def test_nothing_is_published_without_the_claim_and_nothing_is_lost_by_it():
    """Until the instance before this one has taken its metrics away; then what was counted meanwhile is published."""
    sink, made = Sink(), []
    claim = Claim(at=3)

    def collect():
        made.append(dict(sink.values))
        counted.release()
        return registry(len(made), 1, (1, len(made)))

    counted = threading.Semaphore(0)
    mirror = Mirror(sink, {"model": "m"})
    mirror.period = 0.001
    publisher = Publisher(mirror, collect, print, claim)
    for _ in range(5):
        assert counted.acquire(timeout=LIMIT)
    publisher.close()
    assert made[:4] == [{}] * 4  # the look before the first request, two without the claim, and the one before the first values
    assert value(sink, "vllm:tokens_total") == len(made) - 1
    assert value(sink, "vllm:ttft_count") == len(made) - 1
