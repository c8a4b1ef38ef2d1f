"""A closed loop of requests: `in_flight` workers, each sends its next request when its last answer is complete."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

from harness.shapes import MARK, make_prompt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass(frozen=True)
class Load:
    """One cell of the benchmark: what is asked of a target."""

    in_flight: int
    requests: int
    prompt_tokens: int
    answer_tokens: int
    stream: bool
    vocabulary: int
    seed: int = 0

    def prompts(self) -> list[str]:
        """Return the prompts, equal for every target of the same round."""
        source = random.Random(self.seed)
        return [make_prompt(source, self.prompt_tokens, self.vocabulary) for _ in range(self.requests)]


class Client(Protocol):
    """A connection that answers one request at a time."""

    async def ask(self, prompt: str, load: Load, answer: Answer) -> None:
        """Send the prompt, call `answer.add` for each piece of text that arrives, return after the last."""

    async def close(self) -> None:
        """Release the connection."""


@dataclass
class Answer:
    """When the pieces of one answer arrived, in seconds of `time.perf_counter`."""

    started: float
    tokens: int = 0
    times: list[float] = field(default_factory=list)

    def add(self, text: str) -> None:
        """Note that `text` has arrived now; an empty piece, as some targets send last, is none."""
        if not text:
            return
        self.times.append(time.perf_counter())
        self.tokens += text.count(MARK)


@dataclass(frozen=True)
class Measurement:
    """What one load gave. Times in seconds; ITL is (last - first piece) / (tokens - 1) of each answer."""

    tokens_per_s: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    gap_p99: float
    e2e_p50: float
    e2e_p99: float
    pieces_per_answer: float
    wall_s: float
    tokens: int


class WrongAnswerError(Exception):
    """A target sent fewer or more tokens than it was asked for."""


async def run_load(clients: Sequence[Client], load: Load) -> Measurement:
    """Put `load` on one target through `clients`, one worker each.

    Raises:
        WrongAnswerError: an answer did not have exactly `load.answer_tokens` tokens.
    """
    prompts = load.prompts()
    answers: list[Answer] = []
    queue = iter(prompts)
    gc.collect()
    gc.disable()  # a full collection in the load generator would be counted as the target's pause
    started = time.perf_counter()
    try:
        await asyncio.gather(*(_worker(client, queue, load, answers) for client in clients))
    finally:
        gc.enable()
    wall = time.perf_counter() - started
    if len(answers) != load.requests:
        raise WrongAnswerError(f"{len(answers)} answers to {load.requests} requests")
    return summarize(answers, load, wall)


async def _worker(client: Client, prompts: Iterator[str], load: Load, answers: list[Answer]) -> None:
    for prompt in prompts:
        answer = Answer(time.perf_counter())
        await client.ask(prompt, load, answer)
        if answer.tokens != load.answer_tokens:
            raise WrongAnswerError(f"an answer has {answer.tokens} tokens instead of {load.answer_tokens}")
        answers.append(answer)


def summarize(answers: list[Answer], load: Load, wall: float) -> Measurement:
    """Reduce arrival times to the usual figures of serving."""
    first = [answer.times[0] - answer.started for answer in answers]
    whole = [answer.times[-1] - answer.started for answer in answers]
    spread = max(1, load.answer_tokens - 1)
    itl = [(answer.times[-1] - answer.times[0]) / spread for answer in answers]
    gaps = [b - a for answer in answers for a, b in pairwise(answer.times)] or [0.0]
    tokens = sum(answer.tokens for answer in answers)
    return Measurement(
        tokens_per_s=tokens / wall,
        ttft_p50=percentile(first, 50),
        ttft_p99=percentile(first, 99),
        itl_p50=percentile(itl, 50),
        gap_p99=percentile(gaps, 99),
        e2e_p50=percentile(whole, 50),
        e2e_p99=percentile(whole, 99),
        pieces_per_answer=sum(len(answer.times) for answer in answers) / len(answers),
        wall_s=wall,
        tokens=tokens,
    )


def percentile(values: list[float], percent: float) -> float:
    """Return the nearest-rank percentile of `values`, which must not be empty."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(percent / 100 * len(ordered) + 0.5) - 1))]
