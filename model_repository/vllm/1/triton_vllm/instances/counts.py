"""How many requests each instance of a model has in flight, in memory that they share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mmap


class Counts:
    """A number of requests for each instance.

    Each instance writes its own number, in one step, so no lock is needed. A model of one instance
    has memory of its own.

    Args:
        memory: ``size`` bytes, zero at first.
        index: the instance's number.
        count: how many instances there are.
    """

    def __init__(
        self, memory: mmap.mmap | bytearray | None = None, index: int = 0, count: int = 1
    ) -> None:
        self._cells = memoryview(bytearray(self.size(1)) if memory is None else memory).cast("q")
        self._index = index
        self._count = count

    @staticmethod
    def size(count: int) -> int:
        """Return the bytes that ``count`` instances need."""
        return 8 * count

    @property
    def alone(self) -> bool:
        """Whether there is no other instance."""
        return self._count == 1

    def note(self, requests: int) -> None:
        """Tell the others how many requests this instance has."""
        self._cells[self._index] = requests

    def forget(self, index: int) -> None:
        """Remove the requests of an instance that has ended."""
        self._cells[index] = 0

    def others(self) -> int:
        """Return how many requests the other instances have."""
        return 0 if self.alone else sum(self._cells) - self._cells[self._index]
