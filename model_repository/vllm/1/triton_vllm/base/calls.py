"""Call EngineCore about other things than requests, e.g. to load an adapter or to sleep.

vLLM does not end such a call when EngineCore dies. ``Calls`` ends it.
"""

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
            # `wait` does not raise if the call is cancelled. So an exception here means that this
            # coroutine itself was cancelled.
            await asyncio.wait({task})
        finally:
            self._open.discard(task)
            # This has an effect only if this coroutine was cancelled. Otherwise the task is done.
            task.cancel()
        # by `give_up`
        if task.cancelled():
            raise UnavailableError(DEAD)
        try:
            return task.result()
        finally:
            # The exception refers to this frame. If the frame referred back to the exception, all
            # objects of the caller would be kept.
            del task

    def give_up(self) -> None:
        """End all open calls, because the engine is dead."""
        for task in self._open:
            task.cancel()
