"""loadtest.measures and loadtest.record: known times give the figures of `vllm bench serve`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from loadtest.measures import Measures
from loadtest.record import Outcome, Record, Request

if TYPE_CHECKING:
    pass

REQUEST = Request(0, "", {}, stream=True)


def record(sent: float, times: list[float], tokens: int, *, late: float = 0.0) -> Record:
    return Record(
        REQUEST, due=sent - late, sent=sent, times=times, output_tokens=tokens, input_tokens=7, outcome=Outcome.ANSWERED
    )


def failed(sent: float, kind: str = "timeout") -> Record:
    found = Record(REQUEST, due=sent, sent=sent)
    found.fail(kind, "why")
    return found


def measured(*records: Record, **goals: float) -> Measures:
    found = Measures(goals)
    for each in records:
        found.add(each)
    return found


def test_the_definitions() -> None:
    """Two answers over two seconds: four tokens in three pieces, and one token."""
    found = measured(record(10.0, [10.1, 10.2, 10.4], 4, late=0.5), record(10.5, [10.8], 1)).figures(2.0, (99, 99.9))
    expected = {
        "duration": 2.0,
        "completed": 2,
        "total_input_tokens": 14,
        "total_output_tokens": 5,
        "request_throughput": 1.0,
        "output_throughput": 2.5,
        "total_token_throughput": 9.5,
        "mean_ttft_ms": 200,  # 100 and 300
        "std_ttft_ms": 100,
        "median_ttft_ms": 200,
        "p99_ttft_ms": 298,
        "p99.9_ttft_ms": 299.8,
        "median_tpot_ms": 100,  # (10.4 - 10.1) / 3; an answer of one token has none
        "p99_tpot_ms": 100,
        "median_itl_ms": 150,  # 100 and 200
        "median_e2el_ms": 350,  # 400 and 300
        "max_output_tokens_per_s": 4.0,
        "max_concurrent_requests": 2,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert found["from_planned_time"]["median_ttft_ms"] == pytest.approx(450)  # 600 and 300
    assert found["from_planned_time"]["median_e2el_ms"] == pytest.approx(600)  # 900 and 300


def test_a_failure_has_no_times_but_counts() -> None:
    """Throughput is of answers; where failures count as infinite, half of the requests never ended."""
    found = measured(record(1.0, [1.5], 1), failed(1.0), failed(1.2, "refused")).figures(1.0)
    assert (found["sent"], found["completed"], found["failed"], found["cancelled"]) == (3, 1, 2, 0)
    assert found["failures"] == {"timeout": 1, "refused": 1}
    assert found["median_e2el_ms"] == pytest.approx(500)
    assert found["with_failures"]["median_e2el_ms"] is None
    assert found["request_throughput"] == 1.0


def test_goodput_is_of_answers_that_reach_every_goal() -> None:
    """A limit is reached if it is met exactly; an answer of one token has no TPOT to miss; a failure is not good."""
    answers = [record(0.0, [0.25, 0.75], 5), record(0.0, [0.5, 0.75], 5), record(0.0, [0.25, 1.25], 5), record(0.0, [0.125], 1)]
    good = measured(*answers, failed(0.0), ttft=250, tpot=125).figures(2.0)["request_goodput"]
    assert good == pytest.approx(1.0)
    assert measured(*answers).figures(2.0)["request_goodput"] is None


def test_an_empty_response_is_no_piece() -> None:
    """A last response without text, as some servers send it; a token without text, such as half a character, is one."""
    found = Record(REQUEST, due=0.0, sent=0.0)
    found.add((" a", " x"), 2)
    found.add(("", " y"), 2)
    found.add(("",), 1)
    found.add(("",), 0)
    assert (found.output_tokens, len(found.times)) == (5, 3)
    assert (found.text, found.completions) == (" a", [" a", " x y"])
