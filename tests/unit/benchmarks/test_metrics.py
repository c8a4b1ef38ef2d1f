"""The figures are those of `vllm bench serve`: known arrival times give known values."""

from __future__ import annotations

import pytest

from loadtest.measures import Measures
from loadtest.record import Outcome, Record, Request


def measures(*answers: tuple[float, list[float], int]) -> Measures:
    """Return the measures of answers: when each was due, when its pieces came, and its tokens; each was sent 50 ms late."""
    found = Measures()
    for started, times, tokens in answers:
        request = Request(0, "", {}, stream=True)
        record = Record(request, due=started, sent=started + 0.05, times=times, output_tokens=tokens, outcome=Outcome.ANSWERED)
        found.add(record)
    return found


def test_known_times_give_known_figures() -> None:
    """Two answers, of four tokens in three pieces and of one token, over two seconds; times count from when they were due."""
    from harness.metrics import summarize

    found = summarize(measures((10.0, [10.1, 10.2, 10.4], 4), (10.5, [10.8], 1)), duration_s=2.0, unfinished=3)
    expected = {
        "completed": 2,
        "unfinished": 3,
        "output_tokens": 5,
        "request_throughput": 1.0,
        "output_throughput": 2.5,
        "ttft_p50": 0.2,  # 0.1 and 0.3
        "ttft_p99": 0.1 + 0.99 * 0.2,
        "tpot_p50": 0.1,  # (10.4 - 10.1) / 3; one token has none
        "tpot_p99": 0.1,
        "itl_p50": 0.15,  # 0.1 and 0.2
        "itl_p99": 0.1 + 0.99 * 0.1,
        "e2el_p50": 0.35,  # 0.4 and 0.3
        "e2el_p99": 0.3 + 0.99 * 0.1,
        "pieces_per_answer": 2.0,
        "tokens_per_piece": 1.25,
        "sent_late_p99": 0.05,
    }
    assert {name: getattr(found, name) for name in expected} == pytest.approx(expected)
