"""What is asked: conversations of one or several turns, the same for every target that gets the same seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.shapes import make_prompt

if TYPE_CHECKING:
    from collections.abc import Iterator

KINDS = ("fixed", "mixed", "multi-turn")
_SPREAD = 0.7
_WIDEST = 4


@dataclass(frozen=True)
class Load:
    """One cell of the benchmark: what is asked of a target.

    Attributes:
        in_flight: clients, each with one request at a time.
        requests: at most.
        seconds: no request starts later than this; 0 is no limit, for exactly `requests`.
        rate: requests a second, which arrive as a Poisson process does; 0 is the closed loop, where each client sends its
            next request when its last answer is complete.
        workload: one of `KINDS`.
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


@dataclass(frozen=True)
class Turn:
    """One question: its own text, and how many tokens the answer is to have."""

    text: str
    answer_tokens: int


def conversations(load: Load) -> Iterator[list[Turn]]:
    """Yield conversations of `load.requests` turns together.

    `fixed` has one turn of `prompt_tokens` and `answer_tokens` each; `mixed` draws both from a log-normal distribution with
    these as medians (sigma 0.7), between a quarter and four times them; `multi-turn` has `turns` of the fixed lengths, each
    asked with everything said before it, which a prefix cache has.
    """
    source = random.Random(load.seed)
    left = load.requests
    while left > 0:
        turns = min(left, load.turns if load.workload == "multi-turn" else 1)
        yield [_turn(load, source) for _ in range(turns)]
        left -= turns


def most_tokens(load: Load) -> int:
    """Return the most tokens that a prompt and its answer may have together."""
    factor = {"fixed": 1, "mixed": _WIDEST, "multi-turn": load.turns}[load.workload]
    return factor * (load.prompt_tokens + load.answer_tokens)


def _turn(load: Load, source: random.Random) -> Turn:
    lengths = [load.prompt_tokens, load.answer_tokens]
    if load.workload == "mixed":
        lengths = [_drawn(source, length) for length in lengths]
    return Turn(make_prompt(source, lengths[0], load.vocabulary), lengths[1])


def _drawn(source: random.Random, typical: int) -> int:
    drawn = typical * source.lognormvariate(0, _SPREAD)
    return max(1, round(min(max(drawn, typical / _WIDEST), typical * _WIDEST)))
