"""Join a stream's texts and tokens again where vLLM sends tokens before their text."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from triton_vllm.base.protocols import CompletionOutput

# The text of a token may depend on those before it, e.g. on those of the same character.
_CONTEXT_TOKENS = 8
"""How many preceding tokens are decoded together with a token."""
_INCOMPLETE_TEXT = "\ufffd"
"""The text that a decoder writes for the first tokens of a character that takes several tokens."""


@dataclass(frozen=True)
class Fragment:
    """A part of one completion that is read at once; replaces vLLM's CompletionOutput."""

    text: str
    token_ids: Sequence[int]
    finish_reason: str | None = None


class _Token(NamedTuple):
    end: int  # how long the completion's text is at the end of the token
    id: int


class Aligner:
    """Hold back the tokens of a stream until their text has come.

    With stop strings, vLLM holds back text that may be the beginning of a stop string, but not its
    tokens. Its parsers look for a token in the text that comes with it. If the text is another
    token's, they miss the end of the reasoning and pass its marks on as content.

    Args:
        held_characters: how many characters vLLM holds back until the completion ends. If there are
            fewer, it holds back all of them.
        decode: returns the text of token ids.
    """

    def __init__(self, held_characters: int, decode: Callable[[list[int]], str]) -> None:
        self._held = held_characters
        self._decode = decode
        # The tokens before any text. None as soon as some text has come: only then is the length of
        # all text known.
        self._first: list[int] | None = []
        self._recent: list[int] = []  # the last tokens, for `_CONTEXT_TOKENS`
        self._length = 0  # of the completion's text at the end of the last token
        self._waiting: deque[_Token] = deque()
        self._text = ""  # received, and not yet returned
        self._received = 0  # characters
        self._returned = 0  # characters

    def take(self, output: CompletionOutput | Fragment) -> list[Fragment]:
        """Return the parts whose text is complete, with their tokens.

        For the last output of a completion, return all the rest. The last part has the reason of
        the end.
        """
        ended = output.finish_reason is not None
        self._text += output.text
        self._received += len(output.text)
        # 1) Queue the tokens. Once text has come, vLLM holds back exactly `_held` characters. So
        # the received ones give the length of all text so far.
        length = self._received if ended else self._received + self._held
        if self._first is None:
            self._queue(output.token_ids, length, base=self._length)
        else:
            self._first += output.token_ids
            if self._received or ended:
                # At the end, the length does not give the base: vLLM may have cut off the text of
                # the last tokens, as that of a stop string.
                self._queue(self._first, length, base=0 if ended else None)
                self._first = None
        self._length = length
        # 2) Return those whose text has come.
        fragments = []
        while self._waiting and (ended or self._waiting[0].end <= self._received):
            fragments.append(self._next())
        # Text without a token of its own goes to the last token.
        if ended:
            last = fragments.pop() if fragments else Fragment("", [])
            fragments.append(Fragment(last.text + self._text, last.token_ids, output.finish_reason))
        return fragments

    def _queue(self, ids: Sequence[int], length: int, base: int | None) -> None:
        """Let tokens wait for their text: find out where in the completion's text each ends.

        Args:
            ids: all tokens that came before any text, or those of one output. With
                ``stream_interval``, that may be several.
            length: the text's length at the end of the last token.
            base: the text's length before the first token. If None, it is ``length`` without the
                text of these tokens. It may be above 0 even before the first token of all: a
                decoder drops a blank with which a text begins.
        """
        known = [*self._recent, *ids]
        # 1) Decode the tokens: find out how long their text is at the end of each.
        ends: list[int] = []
        end = 0
        # The end of a single token is `length`. It need not be decoded.
        if len(ids) > 1:
            for at in range(len(self._recent), len(known)):
                before = known[max(0, at - _CONTEXT_TOKENS) : at]
                end += self._text_length([*before, known[at]]) - self._text_length(before)
                ends.append(end)
        self._recent = known[-_CONTEXT_TOKENS:]
        # 2) Add the text before them. The end of the last token is given.
        if base is None:
            base = length - end
        ends = [min(base + own_end, length) for own_end in ends[:-1]]
        # Without tokens, this end is not used.
        ends.append(length)
        self._waiting += map(_Token, ends, ids)

    def _text_length(self, ids: list[int]) -> int:
        return len(self._decode(ids).rstrip(_INCOMPLETE_TEXT)) if ids else 0

    def _next(self) -> Fragment:
        """Remove the first token that waits, and return it with its text."""
        token = self._waiting.popleft()
        count = max(0, token.end - self._returned)
        self._returned += count
        text = self._text[:count]
        self._text = self._text[count:]
        return Fragment(text, [token.id])
