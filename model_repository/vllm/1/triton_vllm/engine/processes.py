"""Find the processes of the engine, and end those that a dead engine has left.

A worker may outlive EngineCore: if it waits for another machine's GPU, or still loads the model, it
does not see that its parent has died. It keeps the GPU's memory, and the port where the workers of
several machines meet. So the next engine could not start.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psutil

_PERIOD_S = 1.0
"""From one look at the processes of an engine that starts to the next, s."""
_END_S = 10.0
"""How long a killed process may take to free its GPU and its ports, s."""
_PAUSE_S = 0.05


def current() -> Iterator[psutil.Process]:
    """Yield the processes that this one has started by multiprocessing, with all their children.

    They are the engine's. Those whose parent has ended are not among them.

    Raises:
        psutil.Error: one has just ended, or the kernel does not show it.
    """
    # Imported here because an environment in parts is unpacked after this module is imported.
    import psutil

    for engine in multiprocessing.active_children():
        root = psutil.Process(engine.pid)
        yield root
        yield from root.children(recursive=True)


class Processes:
    """The processes that an engine has started, also those whose parent has ended."""

    def __init__(self) -> None:
        self._seen: set[psutil.Process] = set()

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note the processes each second during the block, and at its end."""
        ends = threading.Event()

        def note() -> None:
            while not ends.wait(_PERIOD_S):
                self._note()

        thread = threading.Thread(target=note, name="triton-engine-processes", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ends.set()
            thread.join()
            self._note()

    def end(self) -> None:
        """Kill those that still run, and wait at most 10 s until they have ended."""
        import psutil

        left = [process for process in self._seen if _is_left(process)]
        self._seen.clear()
        for process in left:
            # It has just ended.
            with contextlib.suppress(psutil.Error):
                process.kill()
        limit = time.monotonic() + _END_S
        while any(map(_is_left, left)) and time.monotonic() < limit:
            time.sleep(_PAUSE_S)

    def _note(self) -> None:
        import psutil

        # One has just ended. The next look finds the others.
        with contextlib.suppress(psutil.Error):
            self._seen.update(current())


def _is_left(process: psutil.Process) -> bool:
    """Return whether a process runs, and will not end by itself."""
    import psutil

    try:
        # A zombie may stay: in a container, process 1 may reap nothing.
        has_ended = not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        # Python's resource tracker removes the shared memory of killed processes, and ends.
        return not has_ended and "resource_tracker" not in " ".join(process.cmdline())
    except psutil.Error:
        return False
