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
    from collections.abc import Callable, Coroutine

    from triton_vllm.base.protocols import EngineClient, Log
    from triton_vllm.lora.store import AdapterStore

ASLEEP = "the model is asleep; an operator request wakes it up"
LOOK_S = 0.05
"""Seconds between two checks whether the requests in flight have ended."""


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
        self._wakes = 0  # wake_up requests so far: each ends the earlier sleeps that have not begun
        self.asleep = self.closed = False
        self.store: AdapterStore | None = None

    async def run(
        self, llm: EngineClient, request: OperatorRequest, wanted: Callable[[], bool]
    ) -> Told:
        """Run a request and return its result; `wanted` returns whether a client still waits for it.

        Raises:
            AdapterError: the operation is not possible now, or not for this model.
            Exception: vLLM's own exception.
        """
        operation, arguments = request.operation, request.arguments
        self._wakes += operation == "wake_up"
        wakes = self._wakes
        does: dict[str, Callable[[], Coroutine[Any, Any, dict[str, Any]]]] = {
            "sleep": lambda: self._sleep(llm, wanted, wakes, arguments.get("level")),
            "wake_up": lambda: self._wake_up(llm),
            "is_sleeping": lambda: self._is_sleeping(llm),
            "reset_prefix_cache": lambda: self._reset(llm),
            "load_lora": lambda: self._load_lora(llm, arguments["name"]),
        }
        if operation == "is_sleeping":  # needs no lock, so it is answered while a sleep waits
            return Told({"operation": operation, **await does[operation]()})
        async with self._lock:
            if not wanted():  # the request was cancelled, or its timeout has expired
                raise UnavailableError(f"{operation} was not begun in time")
            said = await does[operation]()
        self._log.info(f"operator request {operation}: {said}")
        return Told({"operation": operation, **said})

    def begin_anew(self) -> None:
        """Reset the state after the engine was started again: it is awake."""
        self.asleep = self.closed = False

    def give_up(self) -> None:
        """End the waits for an engine that has died."""
        self._calls.give_up()

    async def _sleep(
        self, llm: EngineClient, wanted: Callable[[], bool], wakes: int, level: int | None
    ) -> dict[str, Any]:
        frees = vllm_api.frees_memory(llm)
        if level == 1 and not frees:
            raise UnsupportedError(
                "this model frees no memory in its sleep: its engine argument enable_sleep_mode is not set"
            )
        was, self.asleep = (self.asleep, self.closed), True
        try:
            while self._busy():
                if not wanted():
                    raise UnavailableError("the requests in flight have not ended in time")  # noqa: TRY301 - as all errors
                if wakes != self._wakes:
                    raise UnavailableError(  # noqa: TRY301
                        "wake_up was asked for before the requests in flight had ended"
                    )
                await asyncio.sleep(LOOK_S)
            self.closed = True  # in the same step of the loop as the last check: no job can begin between the two
            await self._calls.answer(llm.sleep(int(frees) if level is None else level))
        except BaseException:
            self.asleep, self.closed = was
            raise
        return {"asleep": True}

    async def _wake_up(self, llm: EngineClient) -> dict[str, Any]:
        await self._calls.answer(llm.wake_up())
        self.asleep = self.closed = False
        return {"asleep": False}

    async def _is_sleeping(self, llm: EngineClient) -> dict[str, Any]:
        return {"asleep": bool(await self._calls.answer(llm.is_sleeping()))}

    async def _reset(self, llm: EngineClient) -> dict[str, Any]:
        return {"reset": bool(await self._calls.answer(llm.reset_prefix_cache()))}

    async def _load_lora(self, llm: EngineClient, name: str) -> dict[str, Any]:
        if self.store is None:
            raise UnsupportedError(NO_LORA)
        if self.asleep:
            raise UnavailableError(ASLEEP)
        version = await self.store.acquire(llm, name, afresh=True)
        return {"name": name, "version": version.request.lora_name}
