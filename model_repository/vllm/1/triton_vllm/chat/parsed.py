"""Read the answers to a chat on a model with parsers: content, reasoning and tool calls."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from triton_vllm.vllm_api import Fragment, Piece

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from triton_vllm.base.protocols import CompletionOutput, RequestOutput
    from triton_vllm.vllm_api import Conversation, Reader

READ_S = 0.005
"""For how many processor seconds a response's outputs are read one by one. The rest is read as one
output, which takes as long as a single one. Some of vLLM's parsers read the whole answer again with
each token: 6 ms at 8,000 tokens of tool calls. A lane that fell behind would never catch up, and
its other streams would wait. Always reading them as one changes the result: a "<think>" stays in
the text."""
_log = logging.getLogger(__name__)
_noted: set[tuple[Any, ...]] = set()


class AnswerReader:
    """Reads the answers to one chat with the model's parsers; it runs in the chat's sender thread.

    If a parser raises, the rest of the completion is answered as plain text. The tokens have been
    paid for, and vLLM's own server would throw them away.

    Args:
        conversation: makes the parsers.
        n: the request's completions.
        clock: returns processor seconds, because a busy machine does not make a parser slow.
    """

    def __init__(
        self, conversation: Conversation, n: int, clock: Callable[[], float] = time.thread_time
    ) -> None:
        self._clock = clock
        readers = [conversation.reader() for _ in range(n)]
        self._aligners = [reader.aligner for reader in readers]
        self._readers: list[Reader | None] = [*readers]

    def read(self, outputs: Sequence[RequestOutput]) -> list[list[Piece]]:
        """Return the new pieces of each completion in consecutive outputs."""
        parts: list[list[CompletionOutput | Fragment]] = [[] for _ in self._readers]
        for output in outputs:
            for part in output.outputs:
                aligner = self._aligners[part.index]
                parts[part.index] += [part] if aligner is None else aligner.take(part)
        until = self._clock() + READ_S
        return [
            self._read_all(i, found, outputs[-1].prompt_token_ids, until)
            for i, found in enumerate(parts)
        ]

    def _read_all(
        self,
        index: int,
        parts: Sequence[CompletionOutput | Fragment],
        prompt: Sequence[int] | None,
        until: float,
    ) -> list[Piece]:
        pieces: list[Piece] = []
        for number, part in enumerate(parts):
            if (
                0 < number < len(parts) - 1 and self._clock() > until
            ):  # a parser may need the first part, such as a mark, alone
                return [*pieces, self._read(index, _joined(parts[number:]), prompt)]
            pieces.append(self._read(index, part, prompt))
        return pieces

    def _read(
        self, index: int, part: CompletionOutput | Fragment, prompt: Sequence[int] | None
    ) -> Piece:
        reader = self._readers[index]
        if reader is not None:
            try:
                return reader.read(part, prompt)
            except Exception as error:  # noqa: BLE001 - a parser may raise anything about the model's text
                # the rest of this completion is plain text
                self._readers[index] = None
                _note(error)
        return Piece(part.text, finish_reason=part.finish_reason)


def _joined(parts: Sequence[CompletionOutput | Fragment]) -> Fragment:
    ids = [token for part in parts for token in part.token_ids]
    return Fragment("".join(part.text for part in parts), ids, parts[-1].finish_reason)


def _note(error: Exception) -> None:
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    kind = (type(error), last and (last.tb_frame.f_code.co_filename, last.tb_lineno))
    if kind not in _noted:
        _noted.add(kind)
        _log.error(
            "An answer could not be parsed, and was sent as plain text (logged once)",
            exc_info=error,
        )
