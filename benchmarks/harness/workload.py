"""The questions of a load, which are the same for every target with the same seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.shapes import make_prompt
from loadtest.record import Request

if TYPE_CHECKING:
    from collections.abc import Iterator

KINDS = ("fixed", "mixed", "multi-turn")
# Sigma of the log-normal lengths, and the largest factor by which they may differ from the typical
# length.
_SPREAD = 0.7
_WIDEST = 4


@dataclass(frozen=True)
class Load:
    """One cell of the benchmark: the questions for a target.

    Attributes:
        in_flight: number of clients, each with one request at a time.
        requests: the largest number of requests.
        vocabulary: the model's number of tokens.
        seconds: no request starts later than this; 0 sets no limit and sends exactly ``requests``.
        rate: requests per second in a Poisson process (open loop). 0 is a closed loop: each client
            sends its next request when its last answer is complete.
        workload: one of ``KINDS``.
        turns: number of turns of a multi-turn conversation.
    """

    in_flight: int
    requests: int
    prompt_tokens: int
    answer_tokens: int
    stream: bool
    vocabulary: int
    seed: int = 0
    seconds: float = 0.0
    rate: float = 0.0
    workload: str = "fixed"
    turns: int = 1


def conversations(load: Load) -> Iterator[list[Request]]:
    """Yield conversations that have ``load.requests`` turns in total.

    - ``fixed``: one turn of ``prompt_tokens`` and ``answer_tokens``.
    - ``mixed``: one turn. Both lengths are log-normal (sigma 0.7) with these medians, and lie
      between a quarter of the median and four times the median.
    - ``multi-turn``: ``turns`` turns of the fixed lengths. The sender repeats the conversation in
      each prompt, and a prefix cache holds it.
    """
    source = random.Random(load.seed)
    left = load.requests
    while left > 0:
        turns = min(left, load.turns if load.workload == "multi-turn" else 1)
        # The index of the conversation's first request among all requests.
        first = load.requests - left
        yield [_make_turn(load, source, first + number) for number in range(turns)]
        left -= turns


def most_tokens(load: Load) -> int:
    """Return the most tokens that a prompt and its answer can have together."""
    factor = {"fixed": 1, "mixed": _WIDEST, "multi-turn": load.turns}[load.workload]
    return factor * (load.prompt_tokens + load.answer_tokens)


def _make_turn(load: Load, source: random.Random, index: int) -> Request:
    """Return one turn of a conversation: a request with a new random prompt.

    The sender puts the earlier turns in front of it.
    """
    prompt = load.prompt_tokens
    answer = load.answer_tokens
    if load.workload == "mixed":
        prompt = _random_length(source, prompt)
        answer = _random_length(source, answer)
    return Request(
        index=index,
        prompt=make_prompt(source, prompt, load.vocabulary),
        # ignore_eos, so that each answer has exactly the number of tokens that was asked for.
        parameters={"max_tokens": answer, "ignore_eos": True, "temperature": 0},
        stream=load.stream,
    )


def _random_length(source: random.Random, typical: int) -> int:
    factor = source.lognormvariate(0, _SPREAD)
    # `most_tokens` relies on these limits.
    factor = min(max(factor, 1 / _WIDEST), _WIDEST)
    return max(1, round(typical * factor))
