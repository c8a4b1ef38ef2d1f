"""The figures are those of `vllm bench serve`: known arrival times give known values."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest


def answer(started: float, times: list[float], tokens: int) -> Any:
    """Return an answer whose pieces came at these times."""
    from harness.metrics import Answer

    return Answer(started, tokens=tokens, times=times)


def test_known_times_give_known_figures() -> None:
    """Two answers, of four tokens in three pieces and of one token, over two seconds."""
    from harness.metrics import summarize

    found = summarize([answer(10.0, [10.1, 10.2, 10.4], 4), answer(10.5, [10.8], 1)], duration_s=2.0, unfinished=3)
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
    }
    assert {name: getattr(found, name) for name in expected} == pytest.approx(expected)


def test_a_whole_answer_has_no_gaps() -> None:
    """One piece each: no TPOT of more than nothing, no ITL."""
    from harness.metrics import summarize

    found = dataclasses.asdict(summarize([answer(0.0, [1.0], 8)], 1.0))
    assert (found["tpot_p99"], found["itl_p99"], found["e2el_p50"]) == (0.0, 0.0, 1.0)


def test_an_answer_counts_tokens_and_not_empty_pieces() -> None:
    """A last piece without text, as some targets send it, is neither a piece nor a gap."""
    from harness.metrics import Answer

    found = Answer(0.0)
    for text in ("w1 w2", " w3", ""):
        found.add(text)
    assert (found.tokens, len(found.times), found.text) == (3, 2, "w1 w2 w3")
