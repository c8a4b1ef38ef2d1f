"""vLLM's Prometheus metrics are mirrored exactly: same sample names, values and histogram buckets."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from support.patience import LIMIT
from triton_vllm.base.dialect import OFFICIAL, OURS
from triton_vllm.metrics.mirror import LONGEST_PAUSE_S, SHARE, Mirror, Publisher, pause_after


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


def test_what_has_not_changed_costs_nothing():
    """Each call is a round trip to the server."""
    sink = Sink()
    mirror = Mirror(sink, {})
    for _ in range(3):
        mirror.follow(registry(5, 2, (1, 3)))
    assert sink.calls == 6


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


def test_an_update_is_of_one_moment_or_does_not_happen():
    """A registry that fails while it is read publishes nothing of this moment."""

    def families():
        yield from registry(7, 2, (3, 3))[:1]
        raise OSError("gone")

    sink = Sink()
    with pytest.raises(OSError, match="gone"):
        Mirror(sink, {"model": "m"}).follow(families())
    assert sink.values == {}


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


@pytest.mark.parametrize(("dialect", "most"), [(OURS, 1.0), (OFFICIAL, 0.1)])
def test_clients_of_the_official_backend_need_not_wait(dialect, most):
    """They look at the page right after an answer; the first values are there at once."""
    sink = Sink()
    mirror = Mirror(sink, {"model": "m"}, dialect=dialect)
    assert 0 < mirror.period <= most
    mirror.period = 600.0
    seen = threading.Semaphore(0)

    def collect():
        seen.release()
        return registry(5, 1, (1, 1))

    publisher = Publisher(mirror, collect, print, Claim())
    for _ in range(2):  # before the first request, and the first values
        assert seen.acquire(timeout=LIMIT)
    publisher.close()


def test_the_official_metrics_are_its_names_labels_and_buckets():
    """Nothing else is published then; vLLM's latency between tokens has the name that it once had."""
    sink = Sink()
    labels = {"engine": "0"}
    name = "vllm:inter_token_latency_seconds"
    counts = {"0.01": 1.0, "0.02": 1.0, "1.0": 2.0, "+Inf": 3.0}
    lines = [(f"{name}_bucket", {**labels, "le": le}, count) for le, count in counts.items()]
    between = family(name, "histogram", *lines, (f"{name}_count", labels, 3.0), (f"{name}_sum", labels, 9.0))
    prompts = family("vllm:prompt_tokens", "counter", ("vllm:prompt_tokens_total", labels, 7))
    Mirror(sink, {"model": "m"}, dialect=OFFICIAL).follow([*registry(5, 2, (1, 3)), between, prompts])
    published = "vllm:time_per_output_token_seconds"
    shown = {"0.01": 1.0, "1": 2.0, "+Inf": 3.0}
    buckets: dict[Any, float] = {(f"{published}_bucket", (("le", le), ("model", "m"))): count for le, count in shown.items()}
    assert sink.values == {
        **buckets,
        (f"{published}_count", (("model", "m"),)): 3,
        (f"{published}_sum", (("model", "m"),)): 9,
        ("vllm:prompt_tokens_total", (("model", "m"),)): 7,
    }


def test_an_official_bucket_may_be_any_of_vllms_where_it_takes_them_all():
    """Counts of tokens have vLLM's buckets there, too."""
    assert OFFICIAL.metric_name("vllm:request_prompt_tokens_bucket", {"le": "20000.0"}) == "vllm:request_prompt_tokens_bucket"
    assert OFFICIAL.metric_name("vllm:e2e_request_latency_seconds_bucket", {"le": "0.3"}) is None


def test_calls_of_the_server_take_a_bounded_share_of_the_time():
    """Where they are slow there are fewer updates."""
    period = OFFICIAL.metrics_period_s
    assert pause_after(0.0, period) == period
    assert 0.05 / (0.05 + pause_after(0.05, period)) <= SHARE
    assert pause_after(60.0, period) == LONGEST_PAUSE_S


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
