"""Join a stream's texts and tokens again where vLLM sends tokens before their text."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triton_vllm.base.protocols import CompletionOutput

_CONTEXT = 8
"""How many preceding tokens the text of a token may depend on, e.g. those of the same character, or a blank."""
_INCOMPLETE = "\ufffd"
"""The text that a decoder writes for the first tokens of a character that takes several tokens."""


@dataclass(frozen=True)
class Fragment:
    """A part of one completion that is read at once, in place of vLLM's CompletionOutput."""

    text: str
    token_ids: Sequence[int]
    finish_reason: str | None = None


class Aligner:
    """Hold back the tokens of a stream until their text has come.

    With stop strings, vLLM holds back text that may be the beginning of a stop string, but not its
    tokens. Its parsers look for a token in the text that comes with it. If the text is another
    token's, they miss the end of the reasoning and pass its marks on as content.

    Args:
        held: characters that vLLM holds back until the completion ends.
        decode: returns the text of token ids.
    """

    def __init__(self, held: int, decode: Callable[[list[int]], str]) -> None:
        self._held = held
        self._decode = decode
        self._first: (
            list[int] | None
        ) = []  # tokens before any text: until some has come, the total length is unknown
        self._recent: list[int] = []
        self._length = 0  # of the text at the end of the last token
        self._waiting: deque[tuple[int, list[int]]] = (
            deque()
        )  # tokens, each with the length of the text at its end
        self._text = ""  # of the tokens that wait
        self._come = self._gone = 0  # characters received, and characters returned

    def take(self, part: CompletionOutput | Fragment) -> list[Fragment]:
        """Return the parts whose text is complete, with their tokens. The last output returns the rest and the reason."""
        ended = part.finish_reason is not None
        self._text += part.text
        self._come += len(part.text)
        # vLLM holds back exactly `held` characters, so the received ones give the length of all
        # text so far.
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

    def _measured(
        self, ids: Sequence[int], length: int, base: int | None
    ) -> list[tuple[int, list[int]]]:
        """Return each token with the length of the text at its end.

        Args:
            ids: tokens that came together. Those before any text do, and with ``stream_interval``
                others.
            length: the text's length at the end of the last token.
            base: the text's length before the first token. None if it follows from ``length``.
        """
        known, ends, end = [*self._recent, *ids], [], 0
        for at in range(len(self._recent), len(known)) if len(ids) > 1 else ():
            before = known[max(0, at - _CONTEXT) : at]
            end += self._text_length([*before, known[at]]) - self._text_length(before)
            ends.append(end)
        self._recent = known[-_CONTEXT:]
        front = length - end if base is None else base
        lengths = [*(min(front + one, length) for one in ends[:-1]), length]
        return [
            (at_end, [token]) for at_end, token in zip(lengths, ids, strict=False)
        ]  # without tokens `lengths` has one entry

    def _text_length(self, ids: list[int]) -> int:
        return len(self._decode(ids).rstrip(_INCOMPLETE)) if ids else 0

    def _whole(self, end: int, ids: list[int]) -> Fragment:
        cut = max(0, end - self._gone)
        text, self._text = self._text[:cut], self._text[cut:]
        self._gone += cut
        return Fragment(text, ids)
