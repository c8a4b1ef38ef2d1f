"""Send the end of each request a moment after its last response."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import threading
import time
from typing import TYPE_CHECKING

from triton_vllm.base import supervised

if TYPE_CHECKING:
    from collections.abc import Callable

    from triton_vllm.base.protocols import Log


class Endings:
    """Calls functions at a later time.

    Args:
        log: logs functions that raise.
        name: the thread's name.

    Attributes:
        call: see ``stuck.Worker``.
    """

    def __init__(self, log: Log, name: str) -> None:
        self._log = log
        # A heap of times (``time.monotonic``), numbers and functions.
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []
        # Numbers order functions that are due at the same time; functions cannot be compared.
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._name = name
        self.call: Callable[[], None] | None = None
        self._thread = supervised.thread(name, self._run, log)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, end: Callable[[], None], pause_s: float) -> None:
        """Call ``end`` in ``pause_s`` seconds; at once, in this thread, if this is closed."""
        with self._changed:
            if not self._closed:
                entry = (time.monotonic() + pause_s, next(self._numbers), end)
                heapq.heappush(self._waiting, entry)
                # The thread sleeps until the first one is due.
                if self._waiting[0] is entry:
                    self._changed.notify()
                return
        self._call(end)

    def close(self) -> None:
        """Call what waits, then end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def replace(self, call: object) -> bool:
        """See ``stuck.Worker``: let another thread call the rest, unless ``call`` has returned."""
        with self._changed:
            if self.call is not call:
                return False
            self.call = None
        self._thread = supervised.thread(self._name, self._run, self._log)
        self._thread.start()
        return True

    def _run(self) -> None:
        """Call each function when it is due, until this is closed or ``replace`` is called."""
        while (end := self._next()) is not None:
            self._call(end)
            with self._changed:
                # The function took so long that another thread has this one's work.
                if self.call is not end:
                    return
                self.call = None

    def _next(self) -> Callable[[], None] | None:
        """Wait until the next function is due; return it, and set ``call`` to it.

        Return None if this is closed and nothing waits.
        """
        with self._changed:
            while True:
                due = self._waiting[0][0] if self._waiting else math.inf
                rest = due - time.monotonic()
                # When this is closed, no function waits for its time.
                is_due = self._waiting and (self._closed or rest <= 0)
                if is_due:
                    self.call = heapq.heappop(self._waiting)[2]
                    return self.call
                if self._closed:
                    return None
                self._changed.wait(None if rest == math.inf else rest)

    def _call(self, end: Callable[[], None]) -> None:
        """Call a function; log its exception."""
        try:
            end()
        except Exception as error:  # noqa: BLE001 - the others must be called
            # The log goes through Triton's shared memory, which may be full.
            with contextlib.suppress(Exception):
                text = f"a request was not ended: {type(error).__name__}: {error}"
                self._log.error(text)
