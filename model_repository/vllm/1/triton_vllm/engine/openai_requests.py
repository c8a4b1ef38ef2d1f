"""Count the requests to the OpenAI port, and end them; all in the event loop."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from triton_vllm import vllm_api
from triton_vllm.base.errors import UnavailableError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from triton_vllm.base.errors import AdapterError
    from triton_vllm.base.limits import Limits
    from triton_vllm.base.protocols import Collector, EngineClient, Output
    from triton_vllm.engine.outcome import Translator
    from triton_vllm.lora.store import Version

# EngineCore may be in a step, and may read the adapter again.
LINGER_S = 30.0
"""How long a replaced adapter stays after its last request, s."""


@dataclass(slots=True, eq=False)
class Joined:
    """One of vLLM's own requests for a request to the port.

    Attributes:
        id: its id in vLLM.
        count: its completions.
        put: gives it an output, or the exception with which it ends.
    """

    id: str
    count: int
    put: Callable[[Output | Exception], None]


@dataclass(slots=True, eq=False)
class OpenAiRequest:
    """A request to the port, from its arrival until its answer is written.

    All of its state belongs to the event loop.

    Attributes:
        weight: how many requests it counts for.
        asked: the completions and inputs that vLLM has been asked for.
        token_ids: the ids in the lists of ids of all its prompts.
        logprob_values: the log probabilities of all its prompts and answers.
        parts: vLLM's requests for it.
        ended: why it was ended, if it was.
        waiting_since: when it came, in the event loop's time in seconds. Infinity once vLLM is
            known to have begun to work on it.
        deadline: ends it when its timeout has expired.
        adapter: its LoRA adapter. Its files exist as long as some code holds this object.
    """

    weight: int = 1
    asked: int = 0
    token_ids: int = 0
    logprob_values: int = 0
    parts: list[Joined] = field(default_factory=list)
    ended: AdapterError | None = None
    waiting_since: float = 0.0
    deadline: asyncio.TimerHandle | None = None
    adapter: Version | None = None

    def waits(self, llm: EngineClient) -> bool:
        """Return whether vLLM has not begun to work on it."""
        # If vLLM does not say so, the request counts as begun: only streams show it.
        if self.parts and all(
            vllm_api.has_begun(llm, part.id, part.count) is not False for part in self.parts
        ):
            self.waiting_since = math.inf
        return self.waiting_since != math.inf


class OpenAiRequests:
    """The requests to the port that have not been answered.

    Other threads may read ``weight`` and ``is_empty``.

    Args:
        loop: vLLM's event loop.
        translator: makes vLLM's exceptions.
        limits: how long a request may take and wait.
        moved: called for each output.
        counted: called when the number of requests has changed.
        engine: returns the engine that works on the requests, or None.

    Attributes:
        weight: how many requests they count for, in all.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        translator: Translator,
        limits: Limits,
        moved: Callable[[], None],
        counted: Callable[[], None],
        engine: Callable[[], EngineClient | None],
    ) -> None:
        self._loop = loop
        self._translator = translator
        self._limits = limits
        self._moved = moved
        self._counted = counted
        self._engine = engine
        self._open: set[OpenAiRequest] = set()
        # An event loop keeps no task alive.
        self._aborting: set[asyncio.Task[None]] = set()
        self.weight = 0

    def is_empty(self) -> bool:
        """Return whether there is no request."""
        return not self._open

    def begin(self) -> OpenAiRequest:
        """Return a new request, which counts as one."""
        request = OpenAiRequest(waiting_since=self._loop.time())
        self._open.add(request)
        self.weight += request.weight
        self._counted()
        seconds = self._limits.default_timeout_seconds
        if seconds:
            error = UnavailableError(
                f"the default timeout of {float(seconds)} s expired before the request had finished"
            )
            request.deadline = self._loop.call_later(seconds, self.end, request, error)
        return request

    def finish(self, request: OpenAiRequest) -> None:
        """Forget a request, because its answer is written or its client is gone."""
        self._open.discard(request)
        self.weight -= request.weight
        request.weight = 0
        self._counted()
        if request.deadline is not None:
            request.deadline.cancel()
        if request.adapter is not None:
            self._loop.call_later(LINGER_S, lambda _: None, request.adapter)

    def weigh(self, request: OpenAiRequest, count: int) -> None:
        """Count ``count`` more completions or inputs for a request."""
        request.asked += count
        more = max(request.asked - request.weight, 0)
        request.weight += more
        self.weight += more
        self._counted()

    def join(self, request: OpenAiRequest, part_id: str, count: int, collector: Collector) -> None:
        """Note one of vLLM's own requests, which it has taken.

        Args:
            request: the request to the port.
            part_id: the id of vLLM's request.
            count: its completions.
            collector: its collector. Changed: each output is noted.
        """
        put = collector.put

        def noted(item: Output | Exception) -> None:
            self._moved()
            put(item)

        # Patch collector-put: here also because vLLM tells nobody that such an output has come.
        collector.put = noted
        part = Joined(part_id, count, put)
        request.parts.append(part)
        if request.ended is not None:
            part.put(self._translator.raised(request.ended))
            self._abort([part])

    def end(self, request: OpenAiRequest, error: AdapterError) -> None:
        """End a request before vLLM has finished it."""
        if request.ended is not None:
            return
        request.ended = error
        for part in request.parts:
            part.put(self._translator.raised(error))
        self._abort([*request.parts])

    def end_all(self, error: AdapterError) -> None:
        """End all requests."""
        for request in [*self._open]:
            self.end(request, error)

    def overdue(self, came: float, llm: EngineClient) -> list[OpenAiRequest]:
        """Return the requests that have waited since before ``came``, in the loop's time in s."""
        return [
            request
            for request in self._open
            if request.waiting_since < came and request.ended is None and request.waits(llm)
        ]

    def _abort(self, parts: list[Joined]) -> None:
        llm = self._engine()
        if llm is not None and parts and not vllm_api.is_dead(llm):
            task = self._loop.create_task(_stop(llm, parts))
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)


async def _stop(llm: EngineClient, parts: list[Joined]) -> None:
    for part in parts:
        await llm.abort(part.id)
        if part.count > 1:
            vllm_api.forget_parent(llm, part.id)
