"""The client's figures are those of `vllm bench serve`."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from loadtest.measures import Measures
from loadtest.record import Outcome, Record, Request
from support.reference import run_reference

if TYPE_CHECKING:
    from support.serving import Parts

pytestmark = pytest.mark.e2e


@pytest.mark.slow
def test_the_same_time_stamps_give_the_figures_of_vllm_bench_serve(parts: Parts) -> None:
    """Its own code calculates them in the environment: answers of one token and of many, several in a piece, and failures."""
    source = random.Random(5)
    requests: list[dict[str, Any]] = []
    for number in range(400):
        sent = source.uniform(0, 9) if number else 0.0
        pieces = source.randint(1, 30)
        times = [sent + source.expovariate(20)]
        for _ in range(pieces - 1):
            times.append(times[-1] + source.expovariate(40))
        tokens = pieces + source.randint(0, 3)
        failed = number % 17 == 5
        requests.append({"sent": sent, "times": times, "tokens": tokens, "input_tokens": number, "failed": failed})
    asked = {
        "requests": requests,
        "duration": 12.5,
        "percents": [25, 90, 99, 99.9],
        "goals": {"ttft": 60, "tpot": 25, "e2el": 700},
    }
    theirs = run_reference(parts.environment, "reference_figures.py", asked)
    measures = Measures(asked["goals"])
    for each in sorted(requests, key=lambda request: request["sent"]):
        request = Request(0, "", {}, stream=True)
        record = Record(
            request, due=each["sent"], sent=each["sent"], output_tokens=each["tokens"], input_tokens=each["input_tokens"]
        )
        record.times = each["times"]
        record.outcome = Outcome.FAILED if each["failed"] else Outcome.ANSWERED
        measures.add(record)
    ours = measures.figures(asked["duration"], asked["percents"])
    assert len(theirs) > 30
    assert 0 < theirs["request_goodput"] < theirs["request_throughput"]
    assert {name: ours[name] for name in theirs} == pytest.approx(theirs, rel=1e-9)
