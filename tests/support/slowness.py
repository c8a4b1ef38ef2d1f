"""How busy the machine is with other work."""

from __future__ import annotations

import time

SPIN_SECONDS = 0.1


def slowness_now() -> float:
    """Return how many seconds of the clock a processor second takes now."""
    began, used = time.monotonic(), time.thread_time()
    while time.thread_time() - used < SPIN_SECONDS:
        pass
    return max((time.monotonic() - began) / SPIN_SECONDS, 1.0)
