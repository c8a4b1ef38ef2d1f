"""Share the event loop: the outputs of running requests are seen to while many new ones are taken in."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

BUDGET_S = 0.02
"""Seconds of one round of the event loop in which requests are taken in; a streamed token may be that late, and what the last of
them does. In rounds of 5 ms, 128 requests at once cost EngineCore 2 % more, for steps that began with a part of them."""
MOST = 64
"""Requests that are woken for a round; those that find its budget spent go back to their places."""


class Turns:
    """Lets requests work in each round of the event loop until its budget is spent, in the order in which they came.

    The budget is exceeded by what the last request in it does until its next suspension. All methods are called in the loop.

    Args:
        budget: seconds of a round.
        clock: returns seconds.

    Attributes:
        counting: held while a piece of a long text is counted in another thread.
    """

    def __init__(self, budget: float = BUDGET_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._budget = budget
        self._clock = clock
        self.counting = asyncio.Lock()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._end: float | None = None  # of this round's budget; None before its first request
        self._woken = 0  # of this round, and have not run yet
        self._returned = 0  # of this round, to the head of the queue
        self._size = 1  # of the next round

    async def take(self) -> None:
        """Return when the caller may work up to its next suspension: in this round, or in its turn."""
        place = len(self._waiting) + self._woken
        if place == 0 and self._end is None:
            asyncio.get_running_loop().call_soon(self._next)
        while place or not self._fits():
            turn = asyncio.get_running_loop().create_future()
            self._waiting.insert(place, turn)
            await turn
            self._woken -= 1
            if self._fits():
                return
            place = self._returned
            self._returned += 1

    def _fits(self) -> bool:
        now = self._clock()
        if self._end is None:
            self._end = now + self._budget
        return now < self._end

    def _next(self) -> None:
        """Wake as many as worked in the last round, or twice as many if all of them could; they work in the next one."""
        self._size = max(1, self._size - self._returned) if self._returned else min(2 * self._size, MOST)
        self._end, self._woken, self._returned = None, 0, 0
        while self._waiting and self._woken < self._size:
            turn = self._waiting.popleft()
            if not turn.done():  # else its request was given up
                turn.set_result(None)
                self._woken += 1
        if self._woken:
            asyncio.get_running_loop().call_soon(self._next)
        else:
            self._size = 1
