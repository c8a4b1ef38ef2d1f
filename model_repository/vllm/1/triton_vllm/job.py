"""One request on its way: what was asked, where answers go, and what waits to be sent."""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triton_vllm.admission.parse import Request

_numbers = itertools.count(1)


class Job:
    """The mutable state of a request.

    `pending` is filled by the event loop and drained by the job's one sender thread; both ends of a deque are atomic,
    so no lock is needed. `queued` says that the job waits in the sender's queue already. `closed` is set by the sender
    before the final response goes out, or when nothing can be delivered any more.

    With the final response the server frees what it knows of the request; asking it whether the request is cancelled
    after that, or at that moment, crashes it. `closing` is held while asking and while `closed` is set.
    """

    __slots__ = (
        "assembler",
        "closed",
        "closing",
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

    def __init__(self, request: Request, params: Any, reply: Any, assembler: Any) -> None:
        self.id = f"triton-{os.getpid()}-{next(_numbers)}"
        self.request = request
        self.params = params
        self.reply = reply
        self.pending: deque[Any] = deque()
        self.queued = False
        self.due = 0.0  # time.monotonic() before which it is not sent again; by the sender thread
        self.closed = False  # by the sender thread
        self.closing = threading.Lock()
        self.ended = False  # by the event loop: the last item has been put
        self.assembler = assembler
        self.lora: Any = None
        self.lane = 0
        self.task: Any = None
        self.deadline: Any = None

    def close(self) -> None:
        """Say that the final response is about to be sent; waits for a question to the server about the job."""
        with self.closing:
            self.closed = True
