"""Put a stream's texts and tokens together again, where vLLM sends tokens before their text."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triton_vllm.protocols import CompletionOutput

_CONTEXT = 8
"""Tokens before another that its text may depend on: those of one character, or a blank."""
_INCOMPLETE = "\ufffd"
"""What a decoder writes for the first tokens of a character that takes several."""


@dataclass(frozen=True)
class Fragment:
    """What is read of one completion at once, in place of vLLM's CompletionOutput."""

    text: str
    token_ids: Sequence[int]
    finish_reason: str | None = None


class Aligner:
    """Hold the tokens of a stream back until their text has come.

    With stop strings vLLM holds back the text that may be the beginning of one, but not its tokens. Its parsers look for a token
    in the text that comes with it: where that is another text, they lose the end of the reasoning and pass marks on as content.

    Args:
        held: characters that vLLM holds back until the completion ends.
        decode: returns the text of token ids.
    """

    def __init__(self, held: int, decode: Callable[[list[int]], str]) -> None:
        self._held = held
        self._decode = decode
        self._first: list[int] | None = []  # until some text has come its whole length is not known
        self._waiting: deque[tuple[int, list[int]]] = deque()  # tokens with the length of the text at their end
        self._text = ""  # of tokens that wait
        self._come = self._gone = 0  # characters

    def take(self, part: CompletionOutput | Fragment) -> list[Fragment]:
        """Return the texts that are whole, each with its tokens; at the end all that is left, with the reason at the last."""
        ended = part.finish_reason is not None
        self._text += part.text
        self._come += len(part.text)
        length = self._come + (0 if ended else self._held)
        if self._first is None:
            self._waiting.append((length, list(part.token_ids)))
        else:
            self._first += part.token_ids
            if self._come or ended:
                self._waiting.extend(self._measured(self._first, None if ended else length))
                self._first = None
        found = []
        while self._waiting and (ended or self._waiting[0][0] <= self._come):
            found.append(self._whole(*self._waiting.popleft()))
        if ended:
            last = found.pop() if found else Fragment("", [])
            found.append(Fragment(last.text + self._text, last.token_ids, part.finish_reason))
        return found

    def _measured(self, ids: list[int], length: int | None) -> list[tuple[int, list[int]]]:
        """Return each of the first tokens with the length at its end; the whole length tells what a stream has in front."""
        ends, end = [], 0
        for count in range(len(ids)):
            before = ids[max(0, count - _CONTEXT) : count]
            end += self._length([*before, ids[count]]) - self._length(before)
            ends.append(end)
        front = length - end if ids and length is not None else 0
        return [(end + front, [token]) for token, end in zip(ids, ends, strict=True)]

    def _length(self, ids: list[int]) -> int:
        return len(self._decode(ids).rstrip(_INCOMPLETE)) if ids else 0

    def _whole(self, end: int, ids: list[int]) -> Fragment:
        cut = max(0, end - self._gone)
        text, self._text = self._text[:cut], self._text[cut:]
        self._gone += cut
        return Fragment(text, ids)
