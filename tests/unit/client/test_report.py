"""loadtest.report: which figures are shown, and when they give no verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from loadtest import samples
from loadtest.measures import Measures
from loadtest.options import parse
from loadtest.overhead import Overhead
from loadtest.record import Outcome, Record, Request
from loadtest.report import figures_of, summary
from loadtest.run import Result

if TYPE_CHECKING:
    pass


def test_a_bottleneck_gives_no_verdict() -> None:
    """Figures that the client has spoiled do not say whether the server reached the goals."""
    options = parse(["-s", "--goodput", "ttft:200"])
    measures = Measures(options.goodput)
    request = Request(0, "", {}, stream=True)
    measures.add(Record(request, due=0.0, sent=0.0, times=[0.1], output_tokens=1, outcome=Outcome.ANSWERED))
    for late, verdict in ((0.001, 0.5), (0.05, None)):
        watched = Overhead(cpu_seconds=0.9, seconds=9.0)
        watched.lag.extend([late] * 10)
        figures = figures_of(options, Result(1, "vllm", measures=measures, overhead=watched, duration=2.0))
        assert figures["request_goodput"] == verdict
        assert ("no verdict" in "".join(summary(options, figures))) == (verdict is None)
    assert Overhead(cpu_seconds=8.91, seconds=9.0).reasons() == ["it used 99% of a core"]
    assert Overhead(cpu_seconds=4.5, seconds=9.0).reasons() == []


def test_a_goal_for_a_time_that_is_not_known_gives_no_goodput() -> None:
    """The server does not count tokens, so no answer has a TPOT."""
    for goal, verdict in (("ttft:200", 0.5), ("tpot:200", None)):
        options = parse(["-s", "--goodput", goal])
        measures = Measures(options.goodput)
        request = Request(0, "", {}, stream=True)
        measures.add(Record(request, due=0.0, sent=0.0, times=[0.1], outcome=Outcome.ANSWERED))
        overhead = Overhead(cpu_seconds=0.9, seconds=9.0)
        figures = figures_of(options, Result(1, "vllm", measures=measures, overhead=overhead, duration=2.0))
        assert figures["request_goodput"] == verdict


def test_a_bottleneck_is_named_to_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """And percentiles from a histogram, too, whatever was asked for."""
    monkeypatch.setattr(samples, "EXACT_LIMIT", 2)
    options = parse(["-s"])
    measures = Measures()
    for _ in range(3):
        request = Request(0, "", {}, stream=True)
        measures.add(Record(request, due=0.0, sent=0.0, times=[0.1], output_tokens=1, outcome=Outcome.ANSWERED))
    result = Result(3, "vllm", measures=measures, overhead=Overhead(cpu_seconds=8.91, seconds=9.0), duration=2.0)
    lines = summary(options, figures_of(options, result))
    assert "TTFT, E2EL: percentiles from a histogram, with an error of at most 1 %" in lines
    assert "The client was the bottleneck: it used 99% of a core" in lines
