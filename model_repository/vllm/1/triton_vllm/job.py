"""One request on its way: what was asked, its answer, and what waits to be sent."""

from __future__ import annotations

import itertools
import os
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

    from triton_vllm.delivery.reply import Reply
    from triton_vllm.delivery.response import ResponseBuilder
    from triton_vllm.protocols import Item
    from triton_vllm.request import Request

_numbers = itertools.count(1)


class Job:
    """The mutable state of a request.

    `pending` is filled by the event loop and drained by the job's one sender thread; both ends of a deque are atomic,
    so no lock is needed. `queued` says that the job waits in the sender's queue already.
    """

    __slots__ = (
        "assembler",
        "deadline",
        "due",
        "ended",
        "id",
        "lane",
        "lora",
        "params",
        "pending",
        "queued",
        "reply",
        "request",
        "task",
    )

    def __init__(self, request: Request, params: Any, reply: Reply, assembler: ResponseBuilder) -> None:
        self.id = f"triton-{os.getpid()}-{next(_numbers)}"
        self.request = request
        self.params = params
        self.reply = reply
        self.pending: deque[Item] = deque()
        self.queued = False
        self.due = 0.0  # time.monotonic() before which it is not sent again; by the sender thread
        self.ended = False  # by the event loop: the last item has been put
        self.assembler = assembler
        self.lora: Any = None
        self.lane = 0
        self.task: asyncio.Task[None] | None = None
        self.deadline: asyncio.TimerHandle | None = None
