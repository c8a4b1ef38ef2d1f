"""Kill a stub so that its server goes on."""

from __future__ import annotations

import psutil

from support.patience import pause, wait_for


def kill_at_rest(stub: int) -> None:
    """Kill a stub at a moment at which it does nothing.

    One that dies while it holds a lock of Triton's shared memory takes the server down: tritonserver waits for ten seconds and
    aborts. A model that publishes its metrics takes such a lock for each of them.
    """
    process = psutil.Process(stub)

    def rests() -> bool:
        before = process.cpu_times()
        pause(0.05)
        return process.cpu_times() == before

    wait_for(rests, f"a moment at which {stub} does nothing")
    process.kill()
