"""A request on its way through the adapter: its content, and its state in the engine."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from triton_vllm.operator.request import OperatorRequest

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping

    from triton_vllm.answer import Reply
    from triton_vllm.call import Request
    from triton_vllm.lora.store import Version
    from triton_vllm.vllm_api import Conversation

_numbers = itertools.count(1)
# Several instances may share one engine, each in a process of its own. The process number keeps
# their ids apart.
_PREFIX = f"triton-{os.getpid()}"


# Two jobs are never equal, and the text of a job would show a client's prompt.
@dataclass(slots=True, eq=False, repr=False)
class Job:
    """A request, and its state in the engine; ``reply`` holds the state of its answer.

    Attributes:
        request: the parsed request. Set by ``request``, like ``params``.
        params: vLLM's SamplingParams or PoolingParams. None for an operator request.
        reply: the answer.
        id: the request's id in vLLM.
        ids: an id for each part of a pooling request. The first is ``id``.
        several: whether there is more than one completion.
        weight: how many requests it counts for: one for each part and each completion. 0 for an
            operator request.
        moved: when its last output or the request itself came, in the event loop's time in
            seconds. Infinity once it has been logged as stuck.
        waiting_since: when the request came, in the same time. Infinity once vLLM is known to have
            begun to work on it.
        added: whether vLLM has the request.
        ended: whether the last item has been put. Set by the event loop, like ``task`` and
            ``deadline``.
        options: additional keyword arguments of vLLM's ``add_request``.
        adapter: its LoRA adapter. Its files exist as long as some code holds this object.
        conversation: the chat for the parsers, if the model has parsers. Otherwise None.
        most_numbers: the most numbers in a pooling request's answer. 0 means no limit.
        task: adds the request to vLLM.
        deadline: ends the request when its timeout has expired.
    """

    request: Request
    params: Any
    reply: Reply
    id: str = field(init=False)
    ids: tuple[str, ...] = field(init=False)
    several: bool = field(init=False)
    weight: int = field(init=False)
    moved: float = 0.0
    waiting_since: float = 0.0
    added: bool = False
    ended: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    adapter: Version | None = None
    conversation: Conversation | None = None
    most_numbers: int = 0
    task: asyncio.Task[None] | None = None
    deadline: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        self.id = f"{_PREFIX}-{next(_numbers)}"
        # vLLM takes one input at a time, so each part becomes a request of its own there.
        parts = len(getattr(self.request, "parts", ())) or 1
        self.ids = (self.id, *(f"{self.id}.{number}" for number in range(1, parts)))
        completions = getattr(self.params, "n", 1)
        self.several = completions > 1
        self.weight = len(self.ids) * completions
        if isinstance(self.request, OperatorRequest):
            self.weight = 0
