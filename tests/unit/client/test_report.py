"""loadtest.report: which figures are shown, and when they give no verdict."""

from __future__ import annotations

from loadtest.measures import Measures
from loadtest.options import parse
from loadtest.overhead import Overhead
from loadtest.record import Outcome, Record, Request
from loadtest.report import figures_of, summary
from loadtest.run import Result


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
