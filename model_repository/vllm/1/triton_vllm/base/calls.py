"""Call EngineCore about other things than requests, and end the waits for it when it has died; vLLM does not end them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from triton_vllm.base.errors import DEAD, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Coroutine


class Calls:
    """The open calls; all methods are called in the engine's event loop."""

    def __init__(self) -> None:
        self._open: set[asyncio.Task[Any]] = set()

    async def answer(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Return the result of a call.

        Raises:
            UnavailableError: the engine died during the call.
            Exception: the call's own exception.
        """
        task = asyncio.ensure_future(call)
        self._open.add(task)
        try:
            # `wait` does not raise if the call is cancelled, so that differs from a cancelled
            # caller.
            await asyncio.wait({task})
        finally:
            self._open.discard(task)
            task.cancel()  # has an effect only if this coroutine was cancelled; otherwise the task is done
        if task.cancelled():
            raise UnavailableError(DEAD)
        try:
            return task.result()
        finally:
            del task  # the exception refers to this frame, which would refer back to it and keep all objects of the caller

    def give_up(self) -> None:
        """End all waits, because the engine is dead."""
        for task in self._open:
            task.cancel()
