"""End what a request waits for, before the request is passed on."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
    from types import TracebackType


class Gone(Exception):  # noqa: N818 - nobody gets it as an error
    """The client has left before its request was passed on."""


@final
class Interrupt:
    """A block of the current task that can be ended with an error, whatever it waits for.

    Args:
        entered: contains this object while the task is in the block.

    Raises:
        Exception: the error that ended the block.
    """

    # `asyncio.wait_for` would start a second task for each request, and Python 3.10 has no
    # `asyncio.timeout`.
    def __init__(self, entered: set[Interrupt]) -> None:
        self._entered = entered
        self._error: Exception | None = None
        self._task: asyncio.Task[object] | None = None

    def __enter__(self) -> Interrupt:
        """Enter the block."""
        self._task = asyncio.current_task()
        self._entered.add(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the block; raise the error of ``end`` in place of its cancellation."""
        self._entered.discard(self)
        if self._error is None:
            return
        # Python counts cancellations since 3.11. This takes off that of ``end``. If one is left,
        # uvicorn has cancelled the task, too, and the task ends.
        uncancel = getattr(self._task, "uncancel", None)
        if uncancel is not None and uncancel():
            return
        # Any other exception of the block goes on as it is.
        was_cancelled = kind is not None and issubclass(kind, asyncio.CancelledError)
        if kind is None or was_cancelled:
            raise self._error from None

    def end(self, error: Exception) -> None:
        """End the block with an error; the first one counts."""
        if self._error is None and self._task is not None:
            self._error = error
            self._task.cancel()


@asynccontextmanager
async def ended_with_client(
    receive: Callable[[], Awaitable[Mapping[str, Any]]], interrupt: Interrupt
) -> AsyncIterator[None]:
    """End the rest of an interrupt's block with ``Gone`` when the client leaves.

    Args:
        receive: returns the next message of ASGI. The whole body has been received.
        interrupt: the block. The current task is in it.
    """

    async def watch() -> None:
        message = await receive()
        if message["type"] == "http.disconnect":
            interrupt.end(Gone())

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
