"""Share the event loop: the outputs of running requests are seen to while many new ones are taken in."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

BUDGET_S = 0.002
"""Seconds of one round of the event loop in which requests are taken in; a streamed token may be this much late."""


class Turns:
    """Lets requests work in the event loop until a round's budget is spent; of the rest, one goes on in each further round.

    The budget is exceeded by what the last request in it does until its next suspension. All methods are called in the loop.

    Args:
        budget: seconds of a round.
        clock: returns seconds.
    """

    def __init__(self, budget: float = BUDGET_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._budget = budget
        self._clock = clock
        self._end: float | None = None  # of this round's budget; None before its first request
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Return when the caller may work up to its next suspension: at once, or in its turn."""
        now = self._clock()
        if self._end is None:
            self._open_round(now)
            return
        if not self._waiting and now < self._end:
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _open_round(self, now: float) -> None:
        self._end = now + self._budget
        asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        """Wake the request that has waited longest; it works in the next round, and this is called again after it."""
        self._end = None
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else its request was given up
                turn.set_result(None)
                self._open_round(self._clock())
                return
