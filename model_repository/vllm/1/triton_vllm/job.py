"""One request on its way: what was asked, its answer, and what waits to be sent."""

from __future__ import annotations

import itertools
import os
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping, Sequence

    from triton_vllm.answer import Reply
    from triton_vllm.base.errors import AdapterError
    from triton_vllm.base.protocols import Item, Tensors
    from triton_vllm.call import Request
    from triton_vllm.chat.parsed import AnswerReader
    from triton_vllm.lora.store import Version
    from triton_vllm.vllm_api import Conversation

_numbers = itertools.count(1)
_PREFIX = f"triton-{os.getpid()}"


class ResponseBuilder(Protocol):
    """Make the responses of one request."""

    def build(self, outputs: Sequence[Any]) -> Tensors:
        """Return the tensors of one response from the outputs since the one before."""


class Job:
    """The mutable state of a request, from `request` to its final response.

    The event loop fills `pending` and the job's one sender thread drains it; both ends of a deque are atomic, so no lock is
    needed.

    Attributes:
        id: by which vLLM knows the request.
        ids: the same for each part of a pooling request; the first is `id`.
        request: what was asked, set by `request`, as is `params`.
        params: vLLM's SamplingParams or PoolingParams.
        conversation: what the parsers of a chat need of the engine, where the model has parsers; else None.
        several: whether there is more than one completion.
        reply: the answer.
        assembler: makes responses from outputs; set by the service.
        reader: parses the answer to a chat, where the model has parsers; else None.
        task: adds the request to the engine; set by the event loop, as are `deadline` and `ended`.
        deadline: ends the request when its timeout has expired.
        ended: the last item has been put.
        added: vLLM has the request.
        waiting_since: the event loop's time of its coming; infinity once vLLM is known to have begun to work on it.
        options: further keyword arguments of vLLM's `add_request`.
        pending: items that have not been sent.
        moved: the event loop's time of its last output, or of its coming; infinity once it has been logged as stuck.
        queued: the job waits in the sender's queue.
        adapter: its LoRA adapter; the files stay for as long as somebody works on the job.
        most_numbers: that a pooling request's answer may have; 0 is no limit.
        bulky: its response may take long to write, so that others should not wait for it.
        refusal: what is sent in place of a bulky answer that has not been written yet; set by the event loop.
        lane: the number of its sender thread.
        due: the outbox's time before which the next response is not sent; set by the sender thread.
    """

    __slots__ = (
        "adapter",
        "added",
        "assembler",
        "bulky",
        "conversation",
        "deadline",
        "due",
        "ended",
        "id",
        "ids",
        "lane",
        "most_numbers",
        "moved",
        "options",
        "params",
        "pending",
        "queued",
        "reader",
        "refusal",
        "reply",
        "request",
        "several",
        "task",
        "waiting_since",
    )

    def __init__(self, request: Request, params: Any, reply: Reply) -> None:
        self.id = f"{_PREFIX}-{next(_numbers)}"
        parts = len(getattr(request, "parts", ())) or 1
        self.ids = (self.id, *(f"{self.id}.{number}" for number in range(1, parts)))
        self.request = request
        self.params = params
        self.several = getattr(params, "n", 1) > 1
        self.reply = reply
        self.pending: deque[Item] = deque()
        self.moved = 0.0
        self.waiting_since = 0.0
        self.added = False
        self.queued = False
        self.due = 0.0
        self.ended = False
        self.assembler: ResponseBuilder
        self.reader: AnswerReader | None = None
        self.options: Mapping[str, Any] = {}
        self.adapter: Version | None = None
        self.conversation: Conversation | None = None
        self.most_numbers = 0
        self.bulky = False
        self.refusal: AdapterError | None = None
        self.lane = 0
        self.task: asyncio.Task[None] | None = None
        self.deadline: asyncio.TimerHandle | None = None
