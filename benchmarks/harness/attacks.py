"""Requests that ask for much, and the same tokens asked for by many clients.

Prompts have one token, so that nearly all of the work is the answer's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_MANY_IDS = 300_000
# The lists of these parameters may have an entry more than once.
_LISTS = ("allowed_token_ids", "stop_token_ids", "bad_words")
KINDS = (
    "`n` with log probabilities",
    "`n` without log probabilities",
    "long lists, with repetitions",
    "requests whose clients leave",
)


@dataclass(frozen=True)
class Attack:
    """Equal requests that are sent at the same time.

    Attributes:
        kind: index of ``KINDS``.
        name: its name in a table.
        parameters: vLLM's ``SamplingParams`` by name, with ``n``.
        requests: number of requests.
        prompt_tokens: tokens in each prompt.
        stream: whether the answers come in pieces.
        leave_after: each client leaves after so many pieces; None waits for the whole answer.
        http: over Triton's HTTP endpoint for streams instead of gRPC.
    """

    kind: int
    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    requests: int = 1
    prompt_tokens: int = 1
    stream: bool = False
    leave_after: int | None = None
    http: bool = False

    def as_clients(self) -> Attack:
        """Return the same tokens, asked for over gRPC by one client for each completion."""
        parameters = {**self.parameters, "n": 1}
        for name in set(_LISTS) & parameters.keys():
            parameters[name] = list(dict.fromkeys(parameters[name]))
        count = self.requests * self.parameters.get("n", 1)
        return replace(self, parameters=parameters, requests=count, http=False)


def attacks(vocabulary: int) -> list[Attack]:
    """Return all attacks, for a model with a vocabulary of at least 50,000 tokens."""
    return [*_with_logprobs(), *_without_logprobs(), *_lists(vocabulary), *_leaving()]


def _answer(n: int, tokens: int, **more: Any) -> dict[str, Any]:
    return {"n": n, "max_tokens": tokens, "min_tokens": tokens, "temperature": 1.0, **more}


def _with_logprobs() -> list[Attack]:
    found = []
    for n, logprobs, tokens, stream in (
        (128, 20, 420, False),
        (128, 20, 150, False),
        (128, 20, 150, True),
        (128, 8, 200, True),
        (64, 20, 300, False),
        (50, 20, 400, True),
        (32, 20, 600, False),
        (16, 20, 1000, True),
        (128, 1, 200, False),
        (8, 20, 1000, False),
    ):
        name = f"n={n}, logprobs={logprobs}, {tokens} tokens{', streamed' if stream else ''}"
        found.append(Attack(0, name, _answer(n, tokens, logprobs=logprobs), stream=stream))
    for requests, logprobs, n in ((20, 20, 1), (40, 5, 1), (5, 20, 4)):
        # vLLM refuses a longer prompt by its characters: more than six for each of 2,048 tokens.
        name = f"{requests} times 1,700 prompt tokens, prompt_logprobs={logprobs}, n={n}"
        parameters = _answer(n, 2, prompt_logprobs=logprobs)
        found.append(Attack(0, name, parameters, requests=requests, prompt_tokens=1700))
    return found


def _without_logprobs() -> list[Attack]:
    found = []
    for n, tokens, requests, stream in (
        (128, 300, 1, False),
        (128, 300, 1, True),
        (128, 1000, 1, False),
        (100, 300, 1, True),
        (64, 500, 1, False),
        (64, 300, 2, True),
        (32, 900, 1, True),
        (16, 1800, 1, False),
        (128, 50, 4, False),
        (127, 50, 4, True),
    ):
        name = f"{requests} times n={n}, {tokens} tokens{', streamed' if stream else ''}"
        found.append(Attack(1, name, _answer(n, tokens), requests=requests, stream=stream))
    return found


def _lists(vocabulary: int) -> list[Attack]:
    ids: Sequence[int] = range(4, vocabulary)
    words = [f"w{number}" for number in range(4, 64)]
    bias = {str(token): 1.0 for token in ids[:20_000]}
    cases: tuple[tuple[str, int, dict[str, Any]], ...] = (
        ("one allowed id 300,000 times", 128, {"allowed_token_ids": [5] * _MANY_IDS}),
        ("one allowed id 300,000 times", 1, {"allowed_token_ids": [5] * _MANY_IDS}),
        ("two allowed ids 100,000 times", 64, {"allowed_token_ids": [5, 6] * 50_000}),
        ("50,000 allowed ids", 1, {"allowed_token_ids": [*ids[:50_000]]}),
        ("50,000 allowed ids", 20, {"allowed_token_ids": [*ids[:50_000]]}),
        ("50,000 allowed ids", 128, {"allowed_token_ids": [*ids[:50_000]]}),
        ("50,000 stop ids", 20, {"stop_token_ids": [*ids[:50_000]]}),
        ("one stop id 100,000 times", 128, {"stop_token_ids": [5] * 100_000}),
        ("20,000 biases", 50, {"logit_bias": bias}),
        ("60 bad words 20 times", 32, {"bad_words": words * 20}),
    )
    return [
        Attack(2, f"{name}, n={n}, 150 tokens", _answer(n, 150, **more)) for name, n, more in cases
    ]


def _leaving() -> list[Attack]:
    found = []
    for requests, n, logprobs, pieces, http in (
        (300, 1, 20, 1, True),
        (300, 1, 20, 20, True),
        (300, 1, 20, 100, True),
        (300, 1, 0, 20, True),
        (300, 1, 20, 20, False),
        (1, 128, 8, 20, False),
        (1, 128, 8, 20, True),
        (4, 64, 8, 20, True),
        (8, 32, 20, 10, True),
        (20, 16, 5, 50, True),
    ):
        name = f"{requests} times n={n}, logprobs={logprobs}, leave after {pieces} pieces"
        parameters = _answer(n, 800, **({"logprobs": logprobs} if logprobs else {}))
        attack = Attack(
            3,
            f"{name}, {'HTTP' if http else 'gRPC'}",
            parameters,
            requests=requests,
            stream=True,
            leave_after=pieces,
            http=http,
        )
        found.append(attack)
    return found
