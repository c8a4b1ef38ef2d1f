"""End what a request waits for, before the request is passed on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from types import TracebackType

    from triton_vllm.base.errors import AdapterError


@final
class Interrupt:
    """A block of the current task that can be ended with an error, whatever it waits for.

    Args:
        entered: contains this object while the task is in the block.

    Raises:
        AdapterError: the error that ended the block.
    """

    # `asyncio.wait_for` would start a second task for each request, and Python 3.10 has no
    # `asyncio.timeout`.
    def __init__(self, entered: set[Interrupt]) -> None:
        self._entered = entered
        self._error: AdapterError | None = None
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
        """Leave the block."""
        self._entered.discard(self)
        if self._error is None:
            return
        # Python counts cancellations since 3.11. If uvicorn has cancelled the task, too, it ends.
        uncancel = getattr(self._task, "uncancel", None)
        if uncancel is not None and uncancel():
            return
        if kind is None or issubclass(kind, asyncio.CancelledError):
            raise self._error from None

    def end(self, error: AdapterError) -> None:
        """End the block with an error; the first one counts."""
        if self._error is None and self._task is not None:
            self._error = error
            self._task.cancel()
