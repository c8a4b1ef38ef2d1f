"""Run operator requests on the engine: sleep, wake up, drop cached prefixes, load an adapter."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from triton_vllm import vllm_api
from triton_vllm.base.calls import Calls
from triton_vllm.base.errors import UnavailableError, UnsupportedError
from triton_vllm.base.official import NO_LORA
from triton_vllm.operator.request import OperatorRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from triton_vllm.base.protocols import EngineClient, Log
    from triton_vllm.instances.sleep import SleepState
    from triton_vllm.lora.store import AdapterStore

ASLEEP = "the model is asleep; an operator request wakes it up"
LOOK_PERIOD_S = 0.05
"""Seconds between two looks: for the end of the requests in flight, or for the turn."""
Answer = dict[str, Any]
"""The result of an operation: a JSON object."""


class Told:
    """The only output of an operator request."""

    finished = True

    def __init__(self, outputs: Answer) -> None:
        self.outputs = outputs


class Operator:
    """Runs operator requests; all methods are called in the engine's event loop.

    At most one of them runs at a time, whichever instance of the model it has reached.

    Args:
        in_flight: returns how many requests are in flight in all instances.
        state: whether the engine sleeps.
        store: the LoRA adapters, if the model has any.
        log: reports results.
    """

    def __init__(
        self,
        in_flight: Callable[[], int],
        state: SleepState,
        store: AdapterStore | None,
        log: Log,
    ) -> None:
        self._in_flight = in_flight
        self._state = state
        self._store = store
        self._log = log
        # The calls of the engine that have no answer yet.
        self._calls = Calls()
        # Held by the operation that runs.
        self._lock = asyncio.Lock()

    @property
    def asleep(self) -> bool:
        """Whether new requests are refused; any thread may read it."""
        return self._state.asleep

    def require_awake(self) -> None:
        """Refuse a request that is not an operator's; any thread may call it.

        Raises:
            UnavailableError: the model is asleep, or about to be.
        """
        if self.asleep:
            raise UnavailableError(ASLEEP)

    def require_open(self) -> None:
        """Refuse a request that was let in just before the engine was sent to sleep.

        Raises:
            UnavailableError: vLLM would hold the request until it is woken up.
        """
        if self._state.closed:
            raise UnavailableError(ASLEEP)

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
        # A question needs no turn, so it is answered while a sleep waits.
        if operation == "is_sleeping":
            asleep = await self._calls.answer(llm.is_sleeping())
            return Told({"operation": operation, "asleep": bool(asleep)})
        # A sleep has the turn while it waits, and this wake_up must end it. So it is counted before
        # it gets the turn itself.
        if operation == "wake_up":
            self._state.note_wake()
        wakes = self._state.wakes()
        async with self._turn(operation, wanted):
            if operation == "sleep":
                answer = await self._sleep(llm, request.arguments.get("level"), wanted, wakes)
            elif operation == "wake_up":
                # Requests are admitted only after that: a sleeping vLLM would hold them.
                await self._calls.answer(llm.wake_up())
                self._state.note_change(asleep=False)
                answer = {"asleep": False}
            elif operation == "reset_prefix_cache":
                answer = {"reset": bool(await self._calls.answer(llm.reset_prefix_cache()))}
            else:
                answer = await self._load_lora(llm, request.arguments["name"])
        self._log.info(f"operator request {operation}: {answer}")
        return Told({"operation": operation, **answer})

    def give_up(self) -> None:
        """End the waits for an engine that has died."""
        self._calls.give_up()

    @contextlib.asynccontextmanager
    async def _turn(self, operation: str, wanted: Callable[[], bool]) -> AsyncIterator[None]:
        """Run no other operation meanwhile, neither in this instance nor in another one.

        Raises:
            UnavailableError: the client no longer waits. ``wanted`` says so.
        """
        # The lock is for this instance, and the turn for all.
        async with self._lock:
            while True:
                # The request may have been cancelled, or its timeout may have expired.
                if not wanted():
                    raise UnavailableError(f"{operation} was not begun in time")
                try:
                    turn = self._state.take_turn()
                    break
                except BlockingIOError:
                    await asyncio.sleep(LOOK_PERIOD_S)
            try:
                yield
            finally:
                self._state.end_turn(turn)

    async def _sleep(
        self, llm: EngineClient, level: int | None, wanted: Callable[[], bool], wakes: int
    ) -> Answer:
        """Refuse new requests, wait for those in flight, then send the engine to sleep.

        Args:
            llm: the engine.
            level: 0 only pauses the engine, 1 also frees its memory. None means 1 if this engine
                can free its memory.
            wanted: returns whether a client still waits for the result.
            wakes: the number of wake_up requests so far. One more ends the wait.

        Raises:
            UnsupportedError: this engine cannot free its memory.
            UnavailableError: requests did not end in time, or wake_up was asked for.
        """
        frees = vllm_api.frees_memory(llm)
        if level == 1 and not frees:
            raise UnsupportedError(
                "this model frees no memory in its sleep: "
                "its engine argument enable_sleep_mode is not set"
            )

        async def wait_for_requests() -> None:
            """Wait until no request is in flight; raise if the sleep is no longer wanted."""
            while True:
                if not wanted():
                    raise UnavailableError("the requests in flight have not ended in time")
                if wakes != self._state.wakes():
                    raise UnavailableError(
                        "wake_up was asked for before the requests in flight had ended"
                    )
                if not self._in_flight():
                    return
                await asyncio.sleep(LOOK_PERIOD_S)

        # The engine may sleep already. A second sleep that fails must not wake it up.
        was_closed = self._state.closed
        with self._state.waiting():
            try:
                await wait_for_requests()
                self._state.closed = True
                # A request may have begun just before, in another instance. Each is counted first,
                # and then looks at `closed`. So if none is counted now, none begins later.
                await wait_for_requests()
                await self._calls.answer(llm.sleep(int(frees) if level is None else level))
            except BaseException:
                if not was_closed:
                    self._state.closed = False
                raise
            self._state.note_change(asleep=True)
        return {"asleep": True}

    async def _load_lora(self, llm: EngineClient, name: str) -> Answer:
        """Load an adapter, even if its files seem unchanged."""
        if self._store is None:
            raise UnsupportedError(NO_LORA)
        self.require_awake()
        version = await self._store.acquire(llm, name, afresh=True)
        return {"name": name, "version": version.request.lora_name}
