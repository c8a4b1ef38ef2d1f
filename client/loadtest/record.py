"""A request, and the record of what happened to it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# The times that `vllm bench serve` takes of each request, and for which goals can be set.
REQUEST_TIMES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class Request:
    """One request to a server.

    Attributes:
        index: its place in the run, from 0. Answers are stored in this order.
        prompt: the text; for a chat, the messages as JSON.
        parameters: vLLM's ``SamplingParams`` by name.
        stream: whether the answer comes in pieces.
        is_chat: whether ``prompt`` holds messages.
        images: pictures as base64 text.
        cancel_after: give the request up after so many pieces; None waits for the whole answer.
    """

    index: int
    prompt: str
    parameters: Mapping[str, Any]
    stream: bool
    is_chat: bool = False
    images: tuple[str, ...] = ()
    cancel_after: int | None = None


class Outcome(Enum):
    """How a request ended. A request that is still running has none."""

    ANSWERED = "answered"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass
class Record:
    """What happened to one request. All times are in seconds of ``time.perf_counter``.

    Attributes:
        request: the request.
        due: when it should be sent. In a closed loop this is the time at which it was sent.
        sent: when it was sent.
        times: when each piece of the answer arrived.
        output_tokens: tokens of the answer so far, over all completions; None if the server has
            not counted them.
        input_tokens: tokens of the prompt; None if the server does not say so.
        pieces: the answer's texts in the order of arrival, for each completion.
        finish_reasons: why each completion ended, as far as the server says so.
        outcome: how it ended.
        failure: the kind of failure, a few words that many requests can share.
        reason: the failure in full.
    """

    request: Request
    due: float
    sent: float
    times: list[float] = field(default_factory=list)
    output_tokens: int | None = None
    input_tokens: int | None = None
    pieces: list[list[str]] = field(default_factory=lambda: [[]])
    finish_reasons: tuple[str, ...] = ()
    outcome: Outcome | None = None
    failure: str = ""
    reason: str = ""

    def add(self, texts: Sequence[str], tokens: int | None) -> None:
        """Note that a response has arrived now.

        Args:
            texts: the text for each completion.
            tokens: number of tokens in the response, over all completions; None if the server has
                not counted them.
        """
        if tokens is not None:
            self.output_tokens = (self.output_tokens or 0) + tokens
        # Some servers send an empty response last. `vllm bench serve` counts it, and we do not.
        if tokens or any(texts):
            self.add_piece(texts)

    def add_piece(self, texts: Sequence[str]) -> None:
        """Note that a piece of the answer has arrived now, which may have no text.

        Args:
            texts: the text for each completion.
        """
        self.times.append(time.perf_counter())
        while len(self.pieces) < len(texts):
            self.pieces.append([])
        for pieces, text in zip(self.pieces, texts, strict=False):
            pieces.append(text)

    def fail(self, kind: str, reason: str) -> None:
        """Note that the request has failed."""
        self.outcome = Outcome.FAILED
        self.failure = kind
        self.reason = reason

    @property
    def text(self) -> str:
        """Return the text of the first completion so far."""
        return "".join(self.pieces[0])

    @property
    def completions(self) -> list[str]:
        """Return the text of each completion so far."""
        return ["".join(pieces) for pieces in self.pieces]
