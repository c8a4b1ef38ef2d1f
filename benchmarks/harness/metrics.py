"""The figures of one load of the benchmark. ``loadtest.measures`` defines and computes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loadtest.measures import Measures


@dataclass(frozen=True)
class Measurement:
    """The figures of one load. Times are in seconds.

    - request and output throughput: complete answers, and their tokens, per second. The time counts
      from the first request to the end of the last answer.
    - TTFT and E2EL start when the request is due, even if it is sent later.
    """

    completed: int
    unfinished: int
    duration_s: float
    output_tokens: int
    request_throughput: float
    output_throughput: float
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    itl_p50: float
    itl_p99: float
    e2el_p50: float
    e2el_p99: float
    pieces_per_answer: float
    tokens_per_piece: float
    sent_late_p99: float


def summarize(measures: Measures, duration_s: float, unfinished: int = 0) -> Measurement:
    """Return the figures.

    Args:
        measures: of complete answers, at least one.
        duration_s: from the first request to the end of the last answer.
        unfinished: number of answers that were given up.
    """
    figures = measures.figures(duration_s)
    return Measurement(
        completed=measures.answered,
        unfinished=unfinished,
        duration_s=duration_s,
        output_tokens=measures.output_tokens,
        request_throughput=figures["request_throughput"],
        output_throughput=figures["output_throughput"],
        ttft_p50=measures.planned_ttft.percentile(50),
        ttft_p99=measures.planned_ttft.percentile(99),
        tpot_p50=measures.tpot.percentile(50),
        tpot_p99=measures.tpot.percentile(99),
        itl_p50=measures.itl.percentile(50),
        itl_p99=measures.itl.percentile(99),
        e2el_p50=measures.planned_e2el.percentile(50),
        e2el_p99=measures.planned_e2el.percentile(99),
        pieces_per_answer=measures.pieces / measures.answered,
        tokens_per_piece=measures.output_tokens / measures.pieces,
        sent_late_p99=measures.sent_late.percentile(99),
    )
