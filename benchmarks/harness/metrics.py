"""The figures of serving, under the names and by the definitions of `vllm bench serve` (vllm/benchmarks/serve.py)."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from harness.shapes import MARK


@dataclass
class Answer:
    """When the pieces of one answer arrived, in seconds of `time.perf_counter`."""

    started: float
    sent_late: float = 0.0
    tokens: int = 0
    times: list[float] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        """Note that `text` has arrived now; an empty piece, as some targets send last, is none."""
        if not text:
            return
        self.times.append(time.perf_counter())
        self.tokens += text.count(MARK)
        self.pieces.append(text)

    @property
    def text(self) -> str:
        """All of its text so far."""
        return "".join(self.pieces)


@dataclass(frozen=True)
class Measurement:
    """What one load gave, times in seconds, percentiles interpolated as `numpy.percentile` does.

    - request and output throughput: complete answers, and their tokens, over the seconds from the first request to the last
      answer's end
    - TTFT: from a request's start to its first piece; in open loop it starts when it is due
    - TPOT: of each answer (last - first piece) / (tokens - 1); answers of one token have none
    - ITL: from a piece to the next of the same answer, over all answers together: the gap that a reader sees
    - E2EL: from a request's start to its last piece
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


def summarize(answers: list[Answer], duration_s: float, unfinished: int = 0) -> Measurement:
    """Reduce the arrival times of complete answers, of which there must be one at least."""
    ttft = [answer.times[0] - answer.started for answer in answers]
    e2el = [answer.times[-1] - answer.started for answer in answers]
    tpot = [(answer.times[-1] - answer.times[0]) / (answer.tokens - 1) for answer in answers if answer.tokens > 1]
    itl = [b - a for answer in answers for a, b in pairwise(answer.times)]
    tokens, pieces = sum(answer.tokens for answer in answers), sum(len(answer.times) for answer in answers)
    return Measurement(
        completed=len(answers),
        unfinished=unfinished,
        duration_s=duration_s,
        output_tokens=tokens,
        request_throughput=len(answers) / duration_s,
        output_throughput=tokens / duration_s,
        ttft_p50=percentile(ttft, 50),
        ttft_p99=percentile(ttft, 99),
        tpot_p50=percentile(tpot, 50),
        tpot_p99=percentile(tpot, 99),
        itl_p50=percentile(itl, 50),
        itl_p99=percentile(itl, 99),
        e2el_p50=percentile(e2el, 50),
        e2el_p99=percentile(e2el, 99),
        pieces_per_answer=pieces / len(answers),
        tokens_per_piece=tokens / pieces,
        sent_late_p99=percentile([answer.sent_late for answer in answers], 99),
    )


def percentile(values: list[float], percent: float) -> float:
    """Return the interpolated percentile of `values`, 0 of none."""
    return float(np.percentile(values or [0.0], percent))
