"""A clock that stops while the machine does.

Tests with a limit in seconds are about the model, not about a virtual machine that its host has put aside for a while:
seconds in which not even a sleeping thread was woken are left out.
"""

from __future__ import annotations

import threading
import time

from support.patience import pause

_TICK = 0.02
_LATE = 0.1  # a wake-up later than this says that the machine stood still


class _Clock:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stolen = 0.0
        self._last = time.monotonic()
        threading.Thread(target=self._tick, name="test-clock", daemon=True).start()

    def _tick(self) -> None:
        while True:
            pause(_TICK)
            self.now()

    def now(self) -> float:
        """Every call is a sign of life, the ticking thread's and the tests' alike."""
        with self._lock:
            at = time.monotonic()
            late = at - self._last - _TICK
            if late > _LATE:
                self._stolen += late
            self._last = at
            return at - self._stolen


_clock: list[_Clock] = []


def now() -> float:
    """Return seconds of a clock of this process that runs while the machine does."""
    if not _clock:
        _clock.append(_Clock())
    return _clock[0].now()
