"""A request on its way through the adapter: its content, and its state in the engine."""

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
    """A request, and its state in the engine; `reply` holds the state of its answer.

    Attributes:
        id: the request's id in vLLM.
        ids: an id for each part of a pooling request. The first is `id`.
        request: the parsed request. Set by `request`, like `params`.
        params: vLLM's SamplingParams or PoolingParams.
        conversation: the chat for the parsers, if the model has parsers. Otherwise None.
        several: whether there is more than one completion.
        reply: the answer.
        task: adds the request to vLLM. Set by the event loop, like `deadline` and `ended`.
        deadline: ends the request when its timeout has expired.
        ended: whether the last item has been put.
        added: whether vLLM has the request.
        waiting_since: when the request came, in the event loop's time. Infinity once vLLM is known
            to have begun to work on it.
        options: additional keyword arguments of vLLM's `add_request`.
        moved: when its last output or the request itself came, in the event loop's time. Infinity
            once it has been logged as stuck.
        adapter: its LoRA adapter. Its files exist as long as some code holds this object.
        most_numbers: the most numbers in a pooling request's answer. 0 means no limit.
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
