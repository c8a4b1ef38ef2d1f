"""What a server may leave behind on a machine that other work shares."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from vllm_env.serve.processes import is_alive

if TYPE_CHECKING:
    from collections.abc import Callable

_NAMES = ("tritonserver", "triton_python_b", "VLLM::")
_REGION = len("vllm_env_0123456789ab_")  # what the names of a server's shared memory begin with
_WORKER = "PYTEST_XDIST_WORKER"  # xdist sets it in each worker, and what a worker starts inherits it


def leftovers(parent: int) -> set[str]:
    """Return processes below ``parent``, servers' orphans, and folders and shared memory of our servers.

    An orphan of somebody else's server counts as well: compare with an earlier look. What the other workers of this run
    have started does not count.
    """
    found = psutil.Process(parent).children(recursive=True)
    words: list[str] = []  # of the other workers' processes: a server is told the names of its folder and shared memory
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if _is_another_workers(process):
                words += [*process.environ().values(), *process.cmdline()]
            elif process.ppid() == 1 and process.name().startswith(_NAMES):
                found.append(process)
    theirs = "\n".join(words)
    regions = {path for path in Path("/dev/shm").glob("vllm_env_*") if path.name[:_REGION] not in theirs}
    folders = {path for path in Path("/tmp").glob("vllm_env_server_*") if path.name not in theirs}
    return {shown(process) for process in found if is_alive(process)} | {str(path) for path in regions | folders}


def _is_another_workers(process: psutil.Process) -> bool:
    worker = process.environ().get(_WORKER)
    return worker is not None and worker != os.environ.get(_WORKER)


def wait_for_none(left: Callable[[], set[str]], seconds: float = 60.0) -> set[str]:
    """Return what is left at the last look, which is the first that finds nothing; another worker's server may just end."""
    until = time.monotonic() + seconds
    while (found := left()) and os.environ.get(_WORKER) and time.monotonic() < until:
        time.sleep(0.2)
    return found


def shown(process: psutil.Process) -> str:
    """A process by name and id."""
    return f"{name_of(process)} ({process.pid})".lstrip()


def name_of(process: psutil.Process) -> str:
    """Return the name of a process, or nothing if it has just ended."""
    with contextlib.suppress(psutil.Error):
        return process.name()
    return ""
