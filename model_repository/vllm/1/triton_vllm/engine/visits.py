"""Let requests in that did not come through Triton, and end them; all in the event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triton_vllm import vllm_api
from triton_vllm.base.errors import UnavailableError
from triton_vllm.engine.visit import LINGER_S, Part, Visit

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from triton_vllm.base.errors import AdapterError
    from triton_vllm.base.limits import Limits
    from triton_vllm.base.protocols import Collector, EngineClient, Output
    from triton_vllm.engine.outcome import Translator


class Visits:
    """The open visits.

    Other threads may read ``weight`` and ``is_empty``.

    Args:
        loop: vLLM's event loop.
        translator: makes vLLM's exceptions.
        limits: how long a request may take and wait.
        moved: called for each output.
        engine: returns the engine that works on the visits, or None.

    Attributes:
        weight: how many requests the visits count for.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        translator: Translator,
        limits: Limits,
        moved: Callable[[], None],
        engine: Callable[[], EngineClient | None],
    ) -> None:
        self._loop = loop
        self._translator = translator
        self._limits = limits
        self._moved = moved
        self._engine = engine
        self._open: set[Visit] = set()
        # An event loop keeps no task alive.
        self._aborting: set[asyncio.Task[None]] = set()
        self.weight = 0

    def is_empty(self) -> bool:
        """Return whether there is no visit."""
        return not self._open

    def begin(self) -> Visit:
        """Return a new visit, which counts as one request."""
        visit = Visit(waiting_since=self._loop.time())
        self._open.add(visit)
        self.weight += visit.weight
        seconds = self._limits.default_timeout_seconds
        if seconds:
            error = UnavailableError(
                f"the default timeout of {float(seconds)} s expired before the request had finished"
            )
            visit.deadline = self._loop.call_later(seconds, self.end, visit, error)
        return visit

    def finish(self, visit: Visit) -> None:
        """Forget a visit, because its answer is written or its client is gone."""
        self._open.discard(visit)
        self.weight -= visit.weight
        visit.weight = 0
        if visit.deadline is not None:
            visit.deadline.cancel()
        if visit.adapter is not None:
            self._loop.call_later(LINGER_S, lambda _: None, visit.adapter)

    def weigh(self, visit: Visit, count: int) -> None:
        """Count ``count`` more completions or inputs for a visit."""
        visit.asked += count
        more = max(visit.asked - visit.weight, 0)
        visit.weight += more
        self.weight += more

    def join(self, visit: Visit, part_id: str, count: int, collector: Collector) -> None:
        """Note a request that vLLM has taken for a visit.

        Args:
            visit: the visit.
            part_id: the request's id in vLLM.
            count: its completions.
            collector: the request's collector. Changed: each output is noted.
        """
        put = collector.put

        def noted(item: Output | Exception) -> None:
            self._moved()
            put(item)

        collector.put = noted
        part = Part(part_id, count, put)
        visit.parts.append(part)
        if visit.ended is not None:
            part.put(self._translator.raised(visit.ended))

    def end(self, visit: Visit, error: AdapterError) -> None:
        """End a visit before vLLM has finished it."""
        if visit.ended is not None:
            return
        visit.ended = error
        for part in visit.parts:
            part.put(self._translator.raised(error))
        llm = self._engine()
        if llm is not None and visit.parts and not vllm_api.is_dead(llm):
            task = self._loop.create_task(self._abort(llm, visit.parts))
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)

    def end_all(self, error: AdapterError) -> None:
        """End all visits."""
        for visit in [*self._open]:
            self.end(visit, error)

    def overdue(self, came: float, llm: EngineClient) -> list[Visit]:
        """Return the visits that have waited since before ``came``, in the loop's time in s."""
        return [
            visit
            for visit in self._open
            if visit.waiting_since < came and visit.ended is None and visit.waits(llm)
        ]

    async def _abort(self, llm: EngineClient, parts: list[Part]) -> None:
        for part in parts:
            await llm.abort(part.id)
            if part.count > 1:
                vllm_api.forget_parent(llm, part.id)
