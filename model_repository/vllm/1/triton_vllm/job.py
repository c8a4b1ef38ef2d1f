"""One request on its way: what was asked, and how far vLLM is with it."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping

    from triton_vllm.answer import Reply
    from triton_vllm.call import Request
    from triton_vllm.lora.store import Version
    from triton_vllm.vllm_api import Conversation

_numbers = itertools.count(1)
_PREFIX = f"triton-{os.getpid()}"


class Job:
    """A request, and its state in the engine; what is sent for it is in `reply`.

    Attributes:
        id: by which vLLM knows the request.
        ids: the same for each part of a pooling request; the first is `id`.
        request: what was asked, set by `request`, as is `params`.
        params: vLLM's SamplingParams or PoolingParams.
        conversation: what the parsers of a chat need of the engine, where the model has parsers; else None.
        several: whether there is more than one completion.
        reply: the answer.
        task: adds the request to the engine; set by the event loop, as are `deadline` and `ended`.
        deadline: ends the request when its timeout has expired.
        ended: the last item has been put.
        added: vLLM has the request.
        waiting_since: the event loop's time of its coming; infinity once vLLM is known to have begun to work on it.
        options: further keyword arguments of vLLM's `add_request`.
        moved: the event loop's time of its last output, or of its coming; infinity once it has been logged as stuck.
        adapter: its LoRA adapter; the files stay for as long as somebody works on the job.
        most_numbers: that a pooling request's answer may have; 0 is no limit.
    """

    __slots__ = (
        "adapter",
        "added",
        "conversation",
        "deadline",
        "ended",
        "id",
        "ids",
        "most_numbers",
        "moved",
        "options",
        "params",
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
        self.moved = 0.0
        self.waiting_since = 0.0
        self.added = False
        self.ended = False
        self.options: Mapping[str, Any] = {}
        self.adapter: Version | None = None
        self.conversation: Conversation | None = None
        self.most_numbers = 0
        self.task: asyncio.Task[None] | None = None
        self.deadline: asyncio.TimerHandle | None = None
