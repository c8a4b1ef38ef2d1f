"""Put a stream's texts and tokens together again, where vLLM sends tokens before their text."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triton_vllm.base.protocols import CompletionOutput

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
        self._recent: list[int] = []
        self._length = 0  # of the text at the last token's end
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
            self._waiting += self._measured(part.token_ids, length, self._length)
        else:
            self._first += part.token_ids
            if self._come or ended:
                self._waiting += self._measured(self._first, length, 0 if ended else None)
                self._first = None
        self._length = length
        found = []
        while self._waiting and (ended or self._waiting[0][0] <= self._come):
            found.append(self._whole(*self._waiting.popleft()))
        if ended:
            last = found.pop() if found else Fragment("", [])
            found.append(Fragment(last.text + self._text, last.token_ids, part.finish_reason))
        return found

    def _measured(self, ids: Sequence[int], length: int, base: int | None) -> list[tuple[int, list[int]]]:
        """Return each token with the length of the text at its end.

        Args:
            ids: tokens that came together, as those before any text have, and with `stream_interval` others.
            length: of the text at the last one's end.
            base: length before the first; None where the whole length tells what a stream has in front.
        """
        known, ends, end = [*self._recent, *ids], [], 0
        for at in range(len(self._recent), len(known)) if len(ids) > 1 else ():
            before = known[max(0, at - _CONTEXT) : at]
            end += self._text_length([*before, known[at]]) - self._text_length(before)
            ends.append(end)
        self._recent = known[-_CONTEXT:]
        front = length - end if base is None else base
        lengths = [*(min(front + one, length) for one in ends[:-1]), length]
        return [(at_end, [token]) for at_end, token in zip(lengths, ids, strict=False)]  # of no tokens there is none

    def _text_length(self, ids: list[int]) -> int:
        return len(self._decode(ids).rstrip(_INCOMPLETE)) if ids else 0

    def _whole(self, end: int, ids: list[int]) -> Fragment:
        cut = max(0, end - self._gone)
        text, self._text = self._text[:cut], self._text[cut:]
        self._gone += cut
        return Fragment(text, ids)
