"""Calls to EngineCore that are no requests: it does not tell those who wait for an answer that it has died."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from triton_vllm.base.errors import DEAD, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Coroutine


class Calls:
    """The calls that are open. All methods are called in the engine's event loop."""

    def __init__(self) -> None:
        self._open: set[asyncio.Task[Any]] = set()

    async def answer(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Return what a call returns.

        Raises:
            UnavailableError: it was given up.
            Exception: whatever it raised.
        """
        task = asyncio.ensure_future(call)
        self._open.add(task)
        try:
            await asyncio.wait({task})
        finally:
            self._open.discard(task)
            task.cancel()  # if this one was cancelled, else it is done
        if task.cancelled():
            raise UnavailableError(DEAD)
        try:
            return task.result()
        finally:
            del task  # an exception has this frame: it would have itself by this, and so would all that the caller has

    def give_up(self) -> None:
        """End all waits: the engine is dead."""
        for task in self._open:
            task.cancel()
