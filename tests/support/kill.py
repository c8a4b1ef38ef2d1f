"""Kill a stub so that its server goes on."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

from support.patience import pause, wait_for


def kill_at_rest(stub: int) -> None:
    """Kill a stub at a moment at which all its threads sleep.

    One that dies while it holds a lock of Triton's shared memory takes the server down: tritonserver waits for ten seconds and
    aborts. A model that publishes its metrics takes such a lock for each of them.
    """

    def rests() -> bool:
        before = _threads(stub)
        assert before, f"process {stub} has ended"
        pause(0.05)
        return set(before.values()) == {"S"} and _threads(stub) == before

    wait_for(rests, f"a moment at which {stub} does nothing")
    os.kill(stub, signal.SIGKILL)


def _threads(process: int) -> dict[tuple[str, ...], str]:
    """Return the state of each thread, by its id and the numbers of its context switches.

    Processor times do not show enough. They are counted in steps of 10 ms, and do not change while a thread waits for a core.
    """
    found = {}
    for status in Path(f"/proc/{process}/task").glob("*/status"):
        with contextlib.suppress(OSError):  # the thread has ended
            text = status.read_text()
            switches = re.findall(r"_ctxt_switches:\s*(\d+)", text)
            found[(status.parent.name, *switches)] = text.partition("State:")[2].split()[0]
    return found
