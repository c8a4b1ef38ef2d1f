"""Refused requests have a counter on Triton's metrics page, next to vLLM's metrics."""

from __future__ import annotations

from typing import Any

from triton_vllm.base.dialect import OFFICIAL, OURS
from triton_vllm.base.errors import CancelledError, InvalidRequestError, UnavailableError
from triton_vllm.base.refusals import Refusals
from triton_vllm.metrics.mirror import Mirror, samples
from triton_vllm.metrics.refused import family


def test_it_counts_by_the_errors_code():
    """From zero on, so that a rate has a first value. What a client gives up itself is no refusal."""
    refusals = Refusals()
    for error in (InvalidRequestError("x"), InvalidRequestError("y"), UnavailableError("z"), CancelledError()):
        refusals.note(error)
    found = [(sample.key, sample.value, sample.counter) for sample in samples([family(refusals.counts())])]
    expected = {"invalid_arg": 2.0, "unsupported": 0.0, "unavailable": 1.0, "internal": 0.0}
    name = "vllm_env_requests_refused_total"
    assert found == [((name, (("reason", reason),)), count, True) for reason, count in expected.items()]


def test_the_official_backend_has_no_such_metric():
    """COMPATIBILITY publishes its metrics only."""
    made = []
    sink: Any = type("Sink", (), {"create": lambda _, name, *rest, **kinds: made.append(name)})()
    for dialect in (OFFICIAL, OURS):
        Mirror(sink, {"model": "m"}, dialect=dialect).follow([family(Refusals().counts())])
    assert made == ["vllm_env_requests_refused_total"] * 4
