"""loadtest.report: which figures are shown, and when they give no verdict."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from loadtest import samples
from loadtest.measures import Measures
from loadtest.options import parse
from loadtest.overhead import Overhead
from loadtest.record import Outcome, Record, Request
from loadtest.report import figures_of, summary
from loadtest.run import Result
from loadtest.versus import Comparison

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


def test_a_comparison_says_how_many_pairs_it_used() -> None:
    """Blocks without answers have no figure, and a few pairs have no interval."""
    options = parse(["-s", "--versus", "b:1"])
    measures = Measures()
    request = Request(0, "", {}, stream=True)
    measures.add(Record(request, due=0.0, sent=0.0, times=[0.1, 0.2], output_tokens=2, outcome=Outcome.ANSWERED))
    figures = measures.figures(1.0)
    empty = Measures().figures(1.0)
    for pairs, line in (
        ([(figures, figures)] * 6, r"TTFT p50: \+0.0% \(95 % interval \+0.0% to \+0.0%\)"),
        ([(figures, figures)] * 6 + [(figures, empty)], r"TTFT p50: .*to \+0.0%, 6 of 7 pairs\)"),
        ([(figures, figures), (figures, empty)], "TTFT p50: no difference, too few pairs of blocks have this figure"),
    ):
        result = Result(1, "vllm", measures=measures, duration=1.0)
        result.comparison = Comparison("b:1", "openai", pairs=pairs)
        lines = summary(options, figures_of(options, result))
        assert any(re.fullmatch(line, each) for each in lines), lines
