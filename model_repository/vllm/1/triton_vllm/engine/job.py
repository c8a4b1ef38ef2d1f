"""What vLLM works on: one record for each request, whichever API it came by."""

from __future__ import annotations

import itertools
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from triton_vllm.base.errors import AdapterError
from triton_vllm.base.protocols import Output
from triton_vllm.operator.run import Told
from triton_vllm.pooling.gathering import Gathered

if TYPE_CHECKING:
    import asyncio

    from triton_vllm.lora.store import Version

Item = Output | Gathered | Told | AdapterError
"""An item of a job's answer: an output, of which the last is finished, or an error at the end."""
BEGUN = math.inf
"""``Job.waiting_since`` of a job that does not wait."""
_numbers = itertools.count(1)
# Several instances may share one engine, each in a process of its own. The process number keeps
# their ids apart.
_PREFIX = f"triton-{os.getpid()}"


class Delivery(ABC):
    """The way from a job to its client; each API has one.

    Attributes:
        is_watched: whether the server must be asked if the client has cancelled the request.
        closed: whether the answer is written, or cannot be written. Any thread may read it.
        pending: the outputs that wait to be sent.
    """

    __slots__ = ()
    is_watched: ClassVar[bool]
    closed: bool
    pending: Sized

    def put(self, item: Output) -> None:
        """Take an output of a submitted job; another one follows."""
        raise NotImplementedError

    @abstractmethod
    def end(self, item: Item) -> None:
        """Take the last item."""

    @abstractmethod
    def lasts(self, item: Item) -> bool:
        """Return whether the job counts until the answer with this last item is written."""

    @abstractmethod
    def refuse(self, error: AdapterError) -> None:
        """Send an error in place of an answer that has ended and is not written."""

    @abstractmethod
    def give_up(self) -> None:
        """Close: nothing more can be passed on."""


Way = TypeVar("Way", bound=Delivery)


@dataclass(slots=True, frozen=True)
class Subrequest:
    """One of vLLM's own requests for a job.

    Attributes:
        id: its id in vLLM.
        completions: how many completions it has.
    """

    id: str
    completions: int = 1


# Two jobs are never equal, and the text of a job would show a client's prompt.
@dataclass(slots=True, eq=False, repr=False)
class Job(Generic[Way]):
    """What vLLM works on for one request of a client.

    Its state belongs to the event loop, but for ``delivery``, ``weight`` and ``silent_since``
    before the loop has it.

    Attributes:
        delivery: takes its outputs and its end to the client.
        weight: how many requests it counts for: one for each input and each completion. 0 for an
            operator request. That of a request to the OpenAI port may grow.
        streams: whether its first output shows that vLLM has begun.
        id: its name, and the id of vLLM's first request for it if it came by Triton.
        silent_since: when its last output or the request itself came, in the event loop's time in
            seconds. Infinity if it is never logged as stuck, or has been logged.
        waiting_since: when the request came, in the same time. Infinity once vLLM is known to have
            begun to work on it.
        subrequests: vLLM's requests for it.
        asked: the completions and inputs that vLLM has been asked for.
        token_ids: the ids in the longest lists of ids of all its prompts.
        logprob_values: the log probabilities of all its prompts and answers.
        ended: whether its last item has been put.
        error: why it was ended before vLLM had finished it.
        refused: why it was refused while vLLM's application worked on it.
        adapter: its LoRA adapter. Its files exist as long as some code holds this object.
        task: adds it to vLLM.
        deadline: ends it when its timeout has expired.
    """

    delivery: Way
    weight: int = 1
    streams: bool = False
    id: str = field(default_factory=lambda: f"{_PREFIX}-{next(_numbers)}")
    silent_since: float = math.inf
    waiting_since: float = BEGUN
    subrequests: list[Subrequest] = field(default_factory=list)
    asked: int = 0
    token_ids: int = 0
    logprob_values: int = 0
    ended: bool = False
    error: AdapterError | None = None
    refused: AdapterError | None = None
    adapter: Version | None = None
    task: asyncio.Task[None] | None = None
    deadline: asyncio.TimerHandle | None = None

    def state(self) -> str:
        """Return what the log says about a stuck job."""
        added = "vLLM has it" if self.task is None else "it is being added"
        return f"{self.id}: {added}, {len(self.delivery.pending)} outputs wait to be sent"
