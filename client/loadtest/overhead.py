"""How much the client itself took part in what it measured."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from loadtest.samples import Samples

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_TICK_SECONDS = 0.02
# Above these, the figures say more about the client than about the server.
MOST_CPU = 0.9
MOST_LAG_SECONDS = 0.01
# A shorter run is over before the client's part can be told from chance: a 99th percentile needs
# 100 ticks.
SHORTEST_SECONDS = 2.0


@dataclass
class Overhead:
    """The client's own part.

    Attributes:
        cpu_seconds: that the event loop's thread used. All of Python runs in it.
        lag: how late the event loop woke up, in seconds. A piece that comes meanwhile seems late.
        seconds: for which the client was watched.
    """

    cpu_seconds: float = 0.0
    lag: Samples = field(default_factory=Samples)
    seconds: float = 0.0

    @property
    def cpu(self) -> float:
        """Return the share of one core that was used."""
        return self.cpu_seconds / self.seconds if self.seconds else 0.0

    def reasons(self) -> list[str]:
        """Return why the client was the bottleneck; an empty list if it was not.

        A run of less than ``SHORTEST_SECONDS`` has no reasons.
        """
        found: list[str] = []
        if self.seconds < SHORTEST_SECONDS:
            return found
        if self.cpu > MOST_CPU:
            found.append(f"it used {self.cpu:.0%} of a core")
        late = self.lag.percentile(99)
        if late > MOST_LAG_SECONDS:
            found.append(f"it woke up {late * 1e3:.0f} ms late (p99)")
        return found

    def figures(self) -> dict[str, Any]:
        """Return the figures for the report."""
        return {
            "cpu": self.cpu,
            "median_lag_ms": self.lag.percentile(50) * 1e3,
            "p99_lag_ms": self.lag.percentile(99) * 1e3,
            "bottleneck": self.reasons(),
        }


@contextlib.asynccontextmanager
async def watch(overhead: Overhead) -> AsyncIterator[None]:
    """Measure the client while the block runs, and add the result to ``overhead``."""
    ticker = asyncio.create_task(_tick(overhead.lag))
    began = time.perf_counter()
    used = time.thread_time()
    try:
        yield
    finally:
        ticker.cancel()
        overhead.cpu_seconds += time.thread_time() - used
        overhead.seconds += time.perf_counter() - began


async def _tick(lag: Samples) -> None:
    while True:
        due = time.perf_counter() + _TICK_SECONDS
        await asyncio.sleep(_TICK_SECONDS)
        lag.extend([max(0.0, time.perf_counter() - due)])
