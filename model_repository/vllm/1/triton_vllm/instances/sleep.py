"""Whether the engine sleeps, and whose turn it is to change that, as all instances see it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from triton_vllm.base import locks

if TYPE_CHECKING:
    import mmap
    from collections.abc import Iterator
    from pathlib import Path

_CLOSED_CELL = 0
"""Whether the engine has been sent to sleep."""
_LATEST_CELL = 1
"""The number of the instance that changed it last."""


class SleepState:
    """What an operator has asked of the engine, in memory that the instances share.

    Operator requests run one at a time, in whichever instance has the turn. Only that instance, or
    a leader that has started an engine, writes ``closed`` and who changed it last. Each instance
    writes its own two numbers; others only end the wait of a dead one. The turn is the only lock. A
    model of one instance has memory of its own.

    Args:
        memory: ``size`` bytes, zero at first.
        index: the instance's number.
        count: how many instances there are.
        turn: the file whose lock is the turn. None if there is no other instance.
    """

    def __init__(
        self,
        memory: mmap.mmap | bytearray | None = None,
        index: int = 0,
        count: int = 1,
        turn: Path | None = None,
    ) -> None:
        # Integers of 64 bits. The first two belong to all instances.
        cells = memoryview(bytearray(self.size(1)) if memory is None else memory).cast("q")
        self._common = cells[:2]
        # A number of each instance: whether its sleep waits, and its wake_up requests so far.
        self._waiting = cells[2 : 2 + count]
        self._wakes = cells[2 + count :]
        self._index = index
        self._turn = turn

    @staticmethod
    def size(count: int) -> int:
        """Return the bytes that ``count`` instances need."""
        return 8 * (2 + 2 * count)

    @property
    def asleep(self) -> bool:
        """Whether new requests are refused: the engine sleeps, or a sleep waits to begin."""
        return self.closed or any(self._waiting)

    @property
    def closed(self) -> bool:
        """Whether the engine has been sent to sleep.

        Requests that were admitted just before are refused, too: vLLM would hold them until it
        wakes up.
        """
        return bool(self._common[_CLOSED_CELL])

    @closed.setter
    def closed(self, closed: bool) -> None:
        self._common[_CLOSED_CELL] = closed

    @property
    def is_latest(self) -> bool:
        """Whether this instance was the last to change the engine's sleep."""
        return self._common[_LATEST_CELL] == self._index

    def note_change(self, *, asleep: bool) -> None:
        """Note that this instance has put the engine to sleep, woken it up or started it."""
        self.closed = asleep
        self._common[_LATEST_CELL] = self._index

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Refuse new requests meanwhile: a sleep of this instance waits for those in flight."""
        self._waiting[self._index] = True
        try:
            yield
        finally:
            self._waiting[self._index] = False

    def note_wake(self) -> None:
        """Count a wake_up request to this instance."""
        self._wakes[self._index] += 1

    def wakes(self) -> int:
        """Return how many wake_up requests there were in all instances."""
        return sum(self._wakes)

    def forget(self, index: int) -> None:
        """End the wait of an instance that has ended."""
        self._waiting[index] = False

    def take_turn(self) -> int | None:
        """Take the turn, and return what ``end_turn`` needs.

        Raises:
            BlockingIOError: another instance has the turn.
            OSError: the file of the turn cannot be made.
        """
        return None if self._turn is None else locks.take(self._turn)

    @staticmethod
    def end_turn(turn: int | None) -> None:
        """Give the turn back."""
        if turn is not None:
            locks.free(turn)
