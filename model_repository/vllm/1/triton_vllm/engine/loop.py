"""The event loop that vLLM runs in, on its own thread."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from triton_vllm.base import supervised

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from triton_vllm.base.protocols import Log


class LoopThread:
    """An event loop and its thread.

    Args:
        note: logs an exception that nothing in the loop has caught, with its origin.
        log: logs an exception that ended the thread's work. The work then continues.

    Attributes:
        loop: uvloop's event loop if uvloop is installed. Otherwise asyncio's.
    """

    def __init__(self, note: Callable[[str, Exception], None], log: Log) -> None:
        self.loop = _new_loop()
        self.loop.set_exception_handler(self._note_failed)
        self._note = note
        self._thread = supervised.thread("triton-engine", self._run, log)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the loop and wait for its end.

        Raises:
            Exception: the coroutine's own exception.
        """
        asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def end(self) -> None:
        """Stop the loop and wait for the thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def _note_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an exception that nothing in the loop has caught; the loop calls this."""
        error = context.get("exception")
        if isinstance(error, Exception):
            self._note(f"event loop: {context.get('message')}", error)
        else:
            loop.default_exception_handler(context)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
