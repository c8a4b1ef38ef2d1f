"""The figures of serving, by the definitions of ``vllm bench serve`` (vllm/benchmarks/serve.py)."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from harness.shapes import MARK


@dataclass
class Answer:
    """The pieces of one answer and their arrival times, in seconds of ``time.perf_counter``.

    Attributes:
        started: when the request was sent or, in open loop, due.
        sent_late: seconds between the two, in open loop.
        tokens: number of tokens so far.
    """

    started: float
    sent_late: float = 0.0
    tokens: int = 0
    times: list[float] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        """Note that ``text`` has arrived now."""
        # Some targets send an empty piece last. `vllm bench serve` counts it, and we do not.
        if not text:
            return
        self.times.append(time.perf_counter())
        # Every token is one word that begins with MARK (shapes.py).
        self.tokens += text.count(MARK)
        self.pieces.append(text)

    @property
    def text(self) -> str:
        """Return the text so far."""
        return "".join(self.pieces)


@dataclass(frozen=True)
class Measurement:
    """The figures of one load. Times are in seconds.

    - request and output throughput: complete answers, and their tokens, per second. The time counts
      from the first request to the end of the last answer.
    - TTFT: from a request's start to its first piece. In open loop, it starts when it is due.
    - TPOT: for each answer (last - first piece) / (tokens - 1). Answers of one token do not count.
    - ITL: from one piece to the next of the same answer, over all answers: the gap that a reader
      sees.
    - E2EL: from a request's start to its last piece.
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
    """Compute the figures.

    Args:
        answers: complete answers, at least one.
        duration_s: from the first request to the end of the last answer.
        unfinished: number of answers that were given up.
    """
    ttft = [answer.times[0] - answer.started for answer in answers]
    e2el = [answer.times[-1] - answer.started for answer in answers]
    tpot = [
        (answer.times[-1] - answer.times[0]) / (answer.tokens - 1)
        for answer in answers
        if answer.tokens > 1
    ]
    itl = [later - earlier for answer in answers for earlier, later in pairwise(answer.times)]
    tokens = sum(answer.tokens for answer in answers)
    pieces = sum(len(answer.times) for answer in answers)
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
    """Return the percentile of ``values``; 0 if there are no values."""
    # Interpolated between two values, as `vllm bench serve` does. Whole answers have no gaps.
    return float(np.percentile(values or [0.0], percent))
