"""Find the processes of a server, also when their parents are gone, and end them.

vLLM's ``EngineCore`` and ``Worker`` outlive a dead stub as orphans and hold memory.
"""
# The parent's id does not find an orphan. Three things do. The server leads a session, which its
# children inherit. A variable in the environment marks them, but setproctitle may overwrite it.
# And the last look noted the process tree.

import contextlib
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

MARKER_VARIABLE = "TRITON_VLLM_SERVER_ID"
# Extracted environments (python_backend's src/pb_env.cc hard-codes the path), and the shared
# memory that Python's multiprocessing makes for vLLM. A killed process removes neither.
_TRACES = re.compile(rb"/tmp/python_env_\w+|/dev/shm/(?:psm_|sem\.mp-)\w+")


def members(leader: int, marker: str, known: Iterable[psutil.Process] = ()) -> list[psutil.Process]:
    """Return the living processes of one server, except zombies and this process.

    Args:
        leader: the id of the server's process, which leads a session of its own.
        marker: the value of the variable ``TRITON_VLLM_SERVER_ID`` in the server's environment.
        known: processes that were members before.
    """
    group = {process for process in known if is_alive(process)}
    group |= {process for process in psutil.process_iter() if _belongs(process, leader, marker)}
    # Children that have a session of their own and have lost the marker.
    for process in list(group):
        with contextlib.suppress(psutil.Error):
            group.update(process.children(recursive=True))
    return [process for process in group if process.pid != os.getpid() and is_alive(process)]


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs and is not a zombie; a later one with its id is another."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _belongs(process: psutil.Process, leader: int, marker: str) -> bool:
    """Return whether a process is in the session of ``leader`` or has the marker in a variable."""
    with contextlib.suppress(OSError):
        if os.getsid(process.pid) == leader:
            return True
    # vLLM's processes lead sessions of their own.
    with contextlib.suppress(psutil.Error, OSError):
        return process.environ().get(MARKER_VARIABLE) == marker
    return False


def dead_children(parent: int) -> frozenset[int]:
    """Return the ids of a process's children that have ended, but for which it has not waited.

    A parent that notices the end of a child waits for it at once. So a child that is here at two
    looks has died without its parent's notice.
    """
    with contextlib.suppress(psutil.Error):
        return frozenset(
            child.pid for child in psutil.Process(parent).children() if not is_alive(child)
        )
    return frozenset()


def traces(group: Iterable[psutil.Process]) -> set[Path]:
    """Return the extracted environments and the shared memory that these processes use."""
    # This reads the kernel's files itself: psutil reads the sizes of all maps, which takes a
    # second for vLLM's processes. A process may end at any moment, hence the OSError.
    paths: set[bytes] = set()
    for process in group:
        folder = Path("/proc", str(process.pid))
        for source in ("environ", "maps", "cmdline"):
            with contextlib.suppress(OSError):
                paths.update(_TRACES.findall((folder / source).read_bytes()))
        # During the extraction, only the server's working folder names the environment.
        with contextlib.suppress(OSError):
            paths.update(_TRACES.findall(os.fsencode((folder / "cwd").readlink())))
    return {Path(os.fsdecode(path)) for path in paths}


def end(group: Iterable[psutil.Process], *, grace: float) -> None:
    """End processes with SIGTERM; after ``grace`` seconds, send SIGKILL to the remaining ones."""
    remaining = list(group)
    for send in (psutil.Process.terminate, psutil.Process.kill):
        for process in remaining:
            with contextlib.suppress(psutil.Error):
                send(process)
        remaining = wait_gone(remaining, timeout=grace)


def wait_gone(group: Iterable[psutil.Process], *, timeout: float) -> list[psutil.Process]:
    """Wait for processes to end; return those that still live after ``timeout`` seconds."""
    # psutil.wait_procs() would also wait for zombies, for which their parents may never wait.
    deadline = time.monotonic() + timeout
    remaining = [process for process in group if is_alive(process)]
    while remaining and time.monotonic() < deadline:
        time.sleep(0.05)
        remaining = [process for process in remaining if is_alive(process)]
    return remaining
