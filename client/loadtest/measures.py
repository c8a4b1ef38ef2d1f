"""The figures of a run, with the definitions and names of ``vllm bench serve``.

Its definitions are in vllm/benchmarks/serve.py, ``calculate_metrics``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from loadtest.record import REQUEST_TIMES, Outcome
from loadtest.samples import Samples

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from loadtest.record import Record


def ttft(record: Record, start: float) -> float:
    """Return the time to first token (s): from ``start`` to the first piece."""
    return record.times[0] - start


def e2el(record: Record, start: float) -> float:
    """Return the end-to-end latency (s): from ``start`` to the last piece."""
    return record.times[-1] - start


def tpot(record: Record) -> float | None:
    """Return the time per output token (s): (last - first piece) / (tokens - 1).

    An answer of at most one token, or of an unknown number, has none.
    """
    if record.output_tokens is None or record.output_tokens <= 1:
        return None
    return (record.times[-1] - record.times[0]) / (record.output_tokens - 1)


def itls(record: Record) -> list[float]:
    """Return the inter-token latencies (s): from each piece to the next one."""
    return [later - earlier for earlier, later in pairwise(record.times)]


@dataclass
class Measures:
    """Collect the records of a run in little memory, and compute its figures.

    Attributes:
        goals: the most milliseconds for a good answer, by names of ``REQUEST_TIMES``.
        start: start of the sending (s of ``time.perf_counter``). The first request to end
            may not be the first one that was sent.
        sent: requests that were sent.
        outcomes: their number by outcome.
        failures: failed requests by the kind of failure.
        input_tokens: tokens of the answered requests' prompts.
        output_tokens: tokens of the complete answers.
        uncounted: complete answers whose tokens the server has not counted. They are in no sum of
            tokens, and they do not reach a goal for TPOT.
        pieces: pieces of the complete answers.
        ttft: from the send, and likewise ``tpot``, ``itl`` and ``e2el``.
        planned_ttft: from the time at which the request was due, and likewise ``planned_e2el``.
        sent_late: seconds from due to sent.
        pieces_in: pieces of complete answers by second since the start.
        last_piece: when the last piece of a complete answer came (s of ``time.perf_counter``).
    """

    goals: Mapping[str, float] = field(default_factory=dict)
    start: float = 0.0
    sent: int = 0
    outcomes: Counter[Outcome | None] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    input_tokens: int = 0
    output_tokens: int = 0
    uncounted: int = 0
    pieces: int = 0
    ttft: Samples = field(default_factory=Samples)
    tpot: Samples = field(default_factory=Samples)
    itl: Samples = field(default_factory=Samples)
    e2el: Samples = field(default_factory=Samples)
    planned_ttft: Samples = field(default_factory=Samples)
    planned_e2el: Samples = field(default_factory=Samples)
    sent_late: Samples = field(default_factory=Samples)
    last_piece: float = float("-inf")
    pieces_in: Counter[int] = field(default_factory=Counter)
    _good: int = 0  # complete answers that reach all goals
    # By second since the start: how many of the complete answers were in flight then.
    _running_in: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, record: Record) -> None:
        """Add a request that has ended.

        Args:
            record: if the request was answered, it has at least one piece.
        """
        self.sent += 1
        self.sent_late.extend([record.sent - record.due])
        self.outcomes[record.outcome] += 1
        if record.outcome is Outcome.FAILED:
            self.failures[record.failure] += 1
        if record.outcome is Outcome.ANSWERED:
            self._add_answer(record)

    def _add_answer(self, record: Record) -> None:
        """Add the times and tokens of a complete answer."""
        self.input_tokens += record.input_tokens or 0
        self.output_tokens += record.output_tokens or 0
        self.uncounted += record.output_tokens is None
        self.pieces += len(record.times)
        self.last_piece = max(self.last_piece, record.times[-1])
        first = ttft(record, record.sent)
        whole = e2el(record, record.sent)
        per_token = tpot(record)
        self.ttft.extend([first])
        self.e2el.extend([whole])
        self.planned_ttft.extend([ttft(record, record.due)])
        self.planned_e2el.extend([e2el(record, record.due)])
        self.itl.extend(itls(record))
        if per_token is not None:
            self.tpot.extend([per_token])
        # An answer of one token has no TPOT. As in `vllm bench serve`, it reaches any goal for it.
        # An answer of an unknown number of tokens reaches none.
        is_uncounted = record.output_tokens is None
        tpot_for_goal = per_token or (float("inf") if is_uncounted else 0.0)
        times = {"ttft": first, "tpot": tpot_for_goal, "e2el": whole}
        if all(times[name] * 1e3 <= limit for name, limit in self.goals.items()):
            self._good += 1
        first_second = int(record.sent - self.start)
        last_second = int(record.times[-1] - self.start)
        for second in range(first_second, last_second + 1):
            self._running_in[second] += 1
        self.pieces_in.update(int(time - self.start) for time in record.times)

    @property
    def answered(self) -> int:
        """Return the number of complete answers."""
        return self.outcomes[Outcome.ANSWERED]

    @property
    def tokens_counted(self) -> bool:
        """Return whether the server has counted the tokens of any answer, or has none to count."""
        return self.uncounted < self.answered or not self.answered

    @property
    def failed(self) -> int:
        """Return the number of failed requests."""
        return self.outcomes[Outcome.FAILED]

    def figures(self, duration: float, percents: Sequence[float] = (99,)) -> dict[str, Any]:
        """Return the figures under the names of ``vllm bench serve``.

        Times in its names are in milliseconds. What it does not have is under names of its own:
        ``cancelled``, ``failures``, ``uncounted``, ``from_planned_time``, ``with_failures``.
        ``with_failures`` takes the times of a failed request for infinite. A percentile that is
        infinite then is None. Throughput in tokens is None if the tokens of any answer are unknown.

        Args:
            duration: seconds from the start of the sending to the end of the last request.
            percents: the percentiles.
        """
        rate = 1 / duration if duration else 0.0
        tokens = self.input_tokens + self.output_tokens
        # If some answers' tokens are not counted, the others' over the whole time would be too few.
        is_complete = not self.uncounted
        kinds = {"ttft": self.ttft, "tpot": self.tpot, "itl": self.itl, "e2el": self.e2el}
        planned = {"ttft": self.planned_ttft, "e2el": self.planned_e2el}
        # The times of which each request has one. ITL is not one of them: nobody can say how many
        # gaps between pieces a failed request would have had.
        by_request = {name: kinds[name] for name in REQUEST_TIMES}
        return {
            "duration": duration,
            "sent": self.sent,
            "completed": self.answered,
            "failed": self.failed,
            "cancelled": self.outcomes[Outcome.CANCELLED],
            "failures": dict(self.failures),
            "uncounted": self.uncounted,
            "total_input_tokens": self.input_tokens,
            "total_output_tokens": self.output_tokens,
            "request_throughput": self.answered * rate,
            "request_goodput": self._good * rate if self.goals else None,
            "output_throughput": self.output_tokens * rate if is_complete else None,
            "total_token_throughput": tokens * rate if is_complete else None,
            # `vllm bench serve`, too, takes each piece for a token here.
            "max_output_tokens_per_s": float(max(self.pieces_in.values(), default=0)),
            "max_concurrent_requests": max(self._running_in.values(), default=0),
            **_times(kinds, percents),
            "from_planned_time": _times(planned, percents),
            "with_failures": {
                name: None if value == float("inf") else value
                for name, value in _percentiles(by_request, percents, self.failed).items()
            },
            "histogram": [name for name, samples in kinds.items() if not samples.exact],
        }


def _times(kinds: Mapping[str, Samples], percents: Sequence[float]) -> dict[str, float]:
    """Return mean, standard deviation and percentiles of each kind of time, in milliseconds."""
    found = {}
    for name, samples in kinds.items():
        found[f"mean_{name}_ms"] = samples.mean() * 1e3
        found[f"std_{name}_ms"] = samples.deviation() * 1e3
    return found | _percentiles(kinds, percents, infinite=0)


def _percentiles(
    kinds: Mapping[str, Samples], percents: Sequence[float], infinite: int
) -> dict[str, float]:
    """Return median and percentiles of each kind of time, in milliseconds.

    Args:
        kinds: the times, by their name.
        percents: the percentiles.
        infinite: number of further values of each kind that are infinite.
    """
    found = {}
    for name, samples in kinds.items():
        found[f"median_{name}_ms"] = samples.percentile(50, infinite=infinite) * 1e3
        for percent in percents:
            value = samples.percentile(percent, infinite=infinite) * 1e3
            found[f"p{percent:g}_{name}_ms"] = value
    return found
