"""What a server may leave behind on a machine that other work shares."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

from vllm_env.serve.processes import is_alive

_NAMES = ("tritonserver", "triton_python_b", "VLLM::")


def leftovers(parent: int) -> set[str]:
    """Return processes below ``parent``, servers' orphans, and folders and shared memory of our servers.

    An orphan of somebody else's server counts as well: compare with an earlier look.
    """
    found = psutil.Process(parent).children(recursive=True)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            found += [process] if process.ppid() == 1 and process.name().startswith(_NAMES) else []
    files = [*Path("/dev/shm").glob("vllm_env_*"), *Path("/tmp").glob("vllm_env_server_*")]
    return {shown(process) for process in found if is_alive(process)} | {str(path) for path in files}


def shown(process: psutil.Process) -> str:
    """A process by name and id."""
    return f"{name_of(process)} ({process.pid})".lstrip()


def name_of(process: psutil.Process) -> str:
    """Return the name of a process, or nothing if it has just ended."""
    with contextlib.suppress(psutil.Error):
        return process.name()
    return ""
