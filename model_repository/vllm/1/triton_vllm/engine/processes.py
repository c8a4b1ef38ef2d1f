"""The processes of the engine: what this process has started by multiprocessing, with its children.

An engine that ends in order takes them along. After the death of EngineCore, a worker may be left:
one that waits for another machine's GPU, or still loads the model, does not see that its parent has
died. It would keep the GPU's memory, and the port where several machines meet.
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
    """Yield the engine's processes whose parents live.

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
    """The processes of an engine since its start, also those whose parents have ended."""

    def __init__(self) -> None:
        self._seen: set[psutil.Process] = set()

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note the processes that are there in the end, and each second before."""
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
        """Kill those that an engine has left, and wait until they have ended, at most 10 s."""
        left = [process for process in self._seen if _is_left(process)]
        self._seen.clear()
        for process in left:
            # It has just ended.
            with contextlib.suppress(_errors()):
                process.kill()
        limit = time.monotonic() + _END_S
        while any(map(_is_left, left)) and time.monotonic() < limit:
            time.sleep(_PAUSE_S)

    def _note(self) -> None:
        with contextlib.suppress(_errors()):
            self._seen.update(current())


def _is_left(process: psutil.Process) -> bool:
    """Return whether a process runs, and will not end by itself."""
    import psutil

    try:
        # In a container, nobody may take the status of a process that has lost its parent.
        has_ended = not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        # Python's resource tracker removes the shared memory of killed processes, and ends.
        return not has_ended and "resource_tracker" not in " ".join(process.cmdline())
    except psutil.Error:
        return False


def _errors() -> type[Exception]:
    import psutil

    return psutil.Error
