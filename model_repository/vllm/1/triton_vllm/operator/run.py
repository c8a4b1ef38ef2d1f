"""Run operator requests on the engine: sleep, wake up, drop cached prefixes, load an adapter."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from triton_vllm import vllm_api
from triton_vllm.base.calls import Calls
from triton_vllm.base.errors import UnavailableError, UnsupportedError
from triton_vllm.base.official import NO_LORA
from triton_vllm.base.protocols import Told
from triton_vllm.operator.request import OperatorRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from triton_vllm.base.protocols import EngineClient, Log
    from triton_vllm.lora.store import AdapterStore

ASLEEP = "the model is asleep; an operator request wakes it up"
LOOK_S = 0.05
"""Seconds between two checks whether the requests in flight have ended."""
Answer = dict[str, Any]
"""The result of an operation: a JSON object."""


class Operator:
    """Runs operator requests, one at a time; all methods are called in the engine's event loop.

    Args:
        busy: returns whether requests for the model are in flight.
        log: reports results.

    Attributes:
        asleep: whether other requests are refused. Other threads read it.
        closed: whether the engine has been sent to sleep. Requests that were admitted just before
            are refused, too: vLLM would hold them until it wakes up.
        store: the LoRA adapters, if the model has any.
    """

    def __init__(self, busy: Callable[[], bool], log: Log) -> None:
        self._busy = busy
        self._log = log
        self._calls = Calls()
        self._lock = asyncio.Lock()
        # The wake_up requests so far. Each ends the earlier sleeps that have not begun.
        self._wakes = 0
        self.asleep = False
        self.closed = False
        self.store: AdapterStore | None = None

    async def run(
        self, llm: EngineClient, request: OperatorRequest, wanted: Callable[[], bool]
    ) -> Told:
        """Run a request and return its result.

        Args:
            llm: the engine.
            request: what to do.
            wanted: returns whether a client still waits for the result.

        Raises:
            AdapterError: the operation is not possible now, or not for this model.
            Exception: vLLM's own exception.
        """
        operation = request.operation
        # A question needs no lock, so it is answered while a sleep waits.
        if operation == "is_sleeping":
            asleep = await self._calls.answer(llm.is_sleeping())
            return Told({"operation": operation, "asleep": bool(asleep)})
        # A sleep holds the lock while it waits, and this wake_up must end it. So it is counted
        # before it gets the lock itself.
        self._wakes += operation == "wake_up"
        wakes = self._wakes
        async with self._lock:
            # The request may have been cancelled, or its timeout may have expired.
            if not wanted():
                raise UnavailableError(f"{operation} was not begun in time")
            if operation == "sleep":
                answer = await self._sleep(llm, request.arguments.get("level"), wanted, wakes)
            elif operation == "wake_up":
                # Requests are admitted only after that: a sleeping vLLM would hold them.
                await self._calls.answer(llm.wake_up())
                self.mark_awake()
                answer = {"asleep": False}
            elif operation == "reset_prefix_cache":
                answer = {"reset": bool(await self._calls.answer(llm.reset_prefix_cache()))}
            else:
                answer = await self._load_lora(llm, request.arguments["name"])
        self._log.info(f"operator request {operation}: {answer}")
        return Told({"operation": operation, **answer})

    def mark_awake(self) -> None:
        """Admit requests again: the engine was woken up, or started again."""
        self.asleep = False
        self.closed = False

    def give_up(self) -> None:
        """End the waits for an engine that has died."""
        self._calls.give_up()

    async def _sleep(
        self, llm: EngineClient, level: int | None, wanted: Callable[[], bool], wakes: int
    ) -> Answer:
        """Refuse new requests, wait for those in flight, then send the engine to sleep."""
        frees = vllm_api.frees_memory(llm)
        if level == 1 and not frees:
            raise UnsupportedError(
                "this model frees no memory in its sleep: "
                "its engine argument enable_sleep_mode is not set"
            )
        # The engine may sleep already. A second sleep that fails must not wake it up.
        before = (self.asleep, self.closed)
        self.asleep = True
        try:
            while self._busy():
                if not wanted():
                    raise UnavailableError(  # noqa: TRY301
                        "the requests in flight have not ended in time"
                    )
                if wakes != self._wakes:
                    raise UnavailableError(  # noqa: TRY301
                        "wake_up was asked for before the requests in flight had ended"
                    )
                await asyncio.sleep(LOOK_S)
            # The last check was in the same step of the loop: no job can begin between the two.
            self.closed = True
            await self._calls.answer(llm.sleep(int(frees) if level is None else level))
        except BaseException:
            self.asleep, self.closed = before
            raise
        return {"asleep": True}

    async def _load_lora(self, llm: EngineClient, name: str) -> Answer:
        """Load an adapter, even if its files seem unchanged."""
        if self.store is None:
            raise UnsupportedError(NO_LORA)
        if self.asleep:
            raise UnavailableError(ASLEEP)
        version = await self.store.acquire(llm, name, afresh=True)
        return {"name": name, "version": version.request.lora_name}
