"""Make the responses to a chat on a model with parsers: content, reasoning and tool calls, each in its tensor."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from triton_vllm.compat import Piece
from triton_vllm.delivery.response import Assembler, string_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triton_vllm.compat import Conversation, Reader
    from triton_vllm.delivery.response import Completion, Tensors
    from triton_vllm.protocols import CompletionOutput, RequestOutput
    from triton_vllm.request import Wants

_log = logging.getLogger(__name__)
_noted: set[tuple[Any, ...]] = set()


class ChatAssembler(Assembler):
    """Make the responses of one chat; parsing runs in its sender thread.

    What a parser raises about is answered as plain text from there on: the tokens have been paid for, and vLLM's own server
    would throw them away.

    Args:
        wants: the optional outputs asked for.
        n: completions of the request.
        conversation: reads them.
    """

    def __init__(self, wants: Wants, n: int, conversation: Conversation) -> None:
        super().__init__(wants, n)
        self._plain = False
        self._readers: list[Reader | None] = [conversation.reader() for _ in range(n)]

    def _parse(self, outputs: Sequence[RequestOutput], completions: list[Completion]) -> Tensors:
        pieces: list[list[Piece]] = [[] for _ in completions]
        for output in outputs:
            for part in output.outputs:
                pieces[part.index].append(self._read(part, output.prompt_token_ids))
        for completion, found in zip(completions, pieces, strict=True):
            completion.text = "".join(piece.content for piece in found)
            completion.finish_reason = next((p.finish_reason for p in reversed(found) if p.finish_reason), None)
        calls = ([call for piece in found for call in piece.tool_calls] for found in pieces)
        return [
            ("tool_calls", string_tensor(*(json.dumps(each, ensure_ascii=False) for each in calls))),
            ("reasoning", string_tensor(*("".join(piece.reasoning for piece in found) for found in pieces))),
        ]

    def _read(self, part: CompletionOutput, prompt: Sequence[int] | None) -> Piece:
        reader = self._readers[part.index]
        if reader is not None:
            try:
                return reader.read(part, prompt)
            except Exception as error:  # noqa: BLE001 - a parser raises what it likes about what a model has written
                self._readers[part.index] = None
                _note(error)
        return Piece(part.text, finish_reason=part.finish_reason)


def _note(error: Exception) -> None:
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    kind = (type(error), last and (last.tb_frame.f_code.co_filename, last.tb_lineno))
    if kind not in _noted:
        _noted.add(kind)
        _log.error("An answer could not be parsed, and was sent as plain text (logged once)", exc_info=error)
