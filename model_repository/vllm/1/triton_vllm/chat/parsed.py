"""Read the answers to a chat on a model with parsers: content, reasoning and tool calls."""

from __future__ import annotations

import logging
import time
import traceback
from typing import TYPE_CHECKING, Any

from triton_vllm.vllm_api import Fragment, Piece

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from triton_vllm.base.protocols import CompletionOutput, RequestOutput
    from triton_vllm.vllm_api import Conversation, Reader

# Some of vLLM's parsers read the whole answer again with each token: 6 ms at 8,000 tokens of tool
# calls. A sender thread that fell behind would never catch up, and its other streams would wait.
# After this time the rest of the outputs is read as one, which takes as long as a single output.
# Doing that always would change the result: a "<think>" stays in the text.
READ_TURN_S = 0.005
"""For how many processor seconds the outputs of a response are read one by one."""
_log = logging.getLogger(__name__)
_logged: set[tuple[Any, ...]] = set()
"""The class and place of each exception that was logged."""


class AnswerReader:
    """Reads the answers to one chat with the model's parsers; it runs in the chat's sender thread.

    Each completion has a reader, which holds a parser, and an aligner, which gives each token its
    text. If a parser raises, the rest of its completion is answered as plain text.

    Args:
        conversation: makes the readers.
        n: the number of the request's completions.
        clock: returns processor seconds of this thread. They limit how long one call of ``read``
            works. Other work of the machine does not count.
    """

    def __init__(
        self, conversation: Conversation, n: int, clock: Callable[[], float] = time.thread_time
    ) -> None:
        self._clock = clock
        readers = [conversation.reader() for _ in range(n)]
        # In a list of their own: a completion needs its aligner also after its parser has failed.
        self._aligners = [reader.aligner for reader in readers]
        # None: the parser has failed, and the rest is plain text.
        self._readers: list[Reader | None] = [*readers]

    def read(self, outputs: Sequence[RequestOutput]) -> list[list[Piece]]:
        """Return the new pieces of each completion in consecutive outputs."""
        # 1) Sort the outputs by completion.
        fragments: list[list[CompletionOutput | Fragment]] = [[] for _ in self._readers]
        for output in outputs:
            for completion in output.outputs:
                aligner = self._aligners[completion.index]
                new = aligner.take(completion) if aligner else [completion]
                fragments[completion.index] += new
        # 2) Read each completion.
        prompt = outputs[-1].prompt_token_ids
        until = self._clock() + READ_TURN_S
        return [self._read_all(i, own, prompt, until) for i, own in enumerate(fragments)]

    def _read_all(
        self,
        index: int,
        fragments: Sequence[CompletionOutput | Fragment],
        prompt: Sequence[int] | None,
        until: float,
    ) -> list[Piece]:
        """Return the new pieces of one completion.

        Args:
            index: the number of the completion.
            fragments: its new texts, in order.
            prompt: the prompt's token ids.
            until: after this time of the clock, the rest is read as one fragment.
        """
        pieces: list[Piece] = []
        for number, fragment in enumerate(fragments):
            # A parser may need the first fragment, such as a mark, alone. And joining takes two.
            may_join = 0 < number < len(fragments) - 1
            if may_join and self._clock() > until:
                return [*pieces, self._read(index, _joined(fragments[number:]), prompt)]
            pieces.append(self._read(index, fragment, prompt))
        return pieces

    def _read(
        self, index: int, fragment: CompletionOutput | Fragment, prompt: Sequence[int] | None
    ) -> Piece:
        """Return a fragment of a completion as its parser reads it, or as plain text."""
        reader = self._readers[index]
        if reader is not None:
            try:
                return reader.read(fragment, prompt)
            except Exception as error:  # noqa: BLE001 - a parser may raise anything
                # The client has paid for the tokens, so it gets the rest as plain text. vLLM's own
                # server would throw them away.
                self._readers[index] = None
                _log_once(error)
        return Piece(fragment.text, finish_reason=fragment.finish_reason)


def _joined(fragments: Sequence[CompletionOutput | Fragment]) -> Fragment:
    """Return consecutive fragments of a completion as one."""
    text = "".join(fragment.text for fragment in fragments)
    ids = [token for fragment in fragments for token in fragment.token_ids]
    return Fragment(text, ids, fragments[-1].finish_reason)


def _log_once(error: Exception) -> None:
    """Log an exception of a parser, unless its class and place in the code were logged before."""
    # A parser that fails on one answer fails on many.
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    place = (type(error), frame.f_code.co_filename, line)
    if place not in _logged:
        _logged.add(place)
        _log.error(
            "An answer could not be parsed, and was sent as plain text (logged once)",
            exc_info=error,
        )
