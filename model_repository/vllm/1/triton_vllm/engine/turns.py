"""Share the event loop: serve the outputs of running requests while many new ones are taken in."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# A streamed token may be that late, plus the time for the last of these requests. In rounds of
# 5 ms, 128 requests at once cost EngineCore 2 % more, for steps that began with some of them.
BUDGET_S = 0.02
"""Seconds of one round of the event loop for taking in requests."""
# Requests that find the budget used up return to their places in the queue.
MOST = 64
"""The most requests that are woken for a round."""


class Turns:
    """Lets requests work in each round of the event loop until its budget is used up.

    They work in their order of arrival. The last request in a round exceeds the budget by its work
    up to its next suspension. All methods are called in the loop.

    Args:
        budget: seconds of a round.
        clock: returns seconds.

    Attributes:
        counting: held while another thread counts a piece of a long text.
    """

    def __init__(
        self, budget: float = BUDGET_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._budget = budget
        self._clock = clock
        self.counting = asyncio.Lock()
        self._waiting: deque[asyncio.Future[None]] = deque()
        # When this round's budget is used up. None before the round's first request.
        self._end: float | None = None
        # Requests that were woken for this round and have not run yet.
        self._woken = 0
        # Requests of this round that went back to the head of the queue.
        self._returned = 0
        # Requests to wake for the next round.
        self._size = 1

    async def take(self) -> None:
        """Wait until the caller may work up to its next suspension."""
        loop = asyncio.get_running_loop()
        # Requests that came earlier, and those that were woken, go first.
        is_first = not self._waiting and self._woken == 0
        if is_first and self._end is None:
            # This request begins a round. The callback ends it.
            loop.call_soon(self._begin_round)
        if is_first and self._has_budget():
            return
        place = len(self._waiting)
        while True:
            turn = loop.create_future()
            self._waiting.insert(place, turn)
            await turn
            self._woken -= 1
            if self._has_budget():
                return
            # Back to the head of the queue, behind those that returned earlier in this round.
            place = self._returned
            self._returned += 1

    def _has_budget(self) -> bool:
        """Return whether there is time left in this round; the first call begins its time."""
        now = self._clock()
        if self._end is None:
            self._end = now + self._budget
        return now < self._end

    def _begin_round(self) -> None:
        """Begin the next round, and wake waiting requests for it; the event loop calls this.

        As many are woken as worked in the last round, or twice as many if all of them could work.
        If none waits, the next call of ``take`` begins the round.
        """
        if self._returned:
            self._size = max(1, self._size - self._returned)
        else:
            self._size = min(2 * self._size, MOST)
        self._end = None
        self._woken = 0
        self._returned = 0
        while self._waiting and self._woken < self._size:
            turn = self._waiting.popleft()
            # The turn of a cancelled request is done already.
            if not turn.done():
                turn.set_result(None)
                self._woken += 1
        if self._woken:
            asyncio.get_running_loop().call_soon(self._begin_round)
        else:
            self._size = 1
