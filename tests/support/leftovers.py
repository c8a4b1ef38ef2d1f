"""What a server may leave behind on a machine that other work shares."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil

from support.patience import wait_for
from vllm_env.serve.processes import is_alive

_NAMES = ("tritonserver", "triton_python_b", "VLLM::")
_REGION = len("vllm_env_0123456789ab_")  # what the names of a server's shared memory begin with
_WORKER = ("PYTEST_XDIST_TESTRUNUID", "PYTEST_XDIST_WORKER")  # xdist sets them, and what a worker starts inherits them


def leftovers(parent: int) -> set[str]:
    """Return processes below ``parent``, servers' orphans, and folders and shared memory of our servers.

    An orphan of somebody else's server counts as well: compare with an earlier look. What other workers, other runs and
    everybody else's running processes use does not count.
    """
    found = psutil.Process(parent).children(recursive=True)
    own = {parent, *(process.pid for process in found)}
    words: list[str] = []  # of others' processes: a server is told the names of its folder and shared memory
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid in own:
                continue
            if process.ppid() == 1 and process.name().startswith(_NAMES) and not _is_another_workers(process):
                found.append(process)
            else:
                words += [*process.environ().values(), *process.cmdline()]
    theirs = "\n".join(words)
    regions = {path for path in _own("/dev/shm", "vllm_env_*") if path.name[:_REGION] not in theirs and not _is_claim(path)}
    folders = {path for path in _own("/tmp", "vllm_env_server_*") if path.name not in theirs}
    return {shown(process) for process in found if is_alive(process)} | {str(path) for path in regions | folders}


def _own(folder: str, pattern: str) -> list[Path]:
    """Return this user's files. The processes that use those of another user cannot be read."""
    found = []
    for path in Path(folder).glob(pattern):
        with contextlib.suppress(OSError):  # it has just gone
            if path.stat().st_uid == os.geteuid():
                found.append(path)
    return found


def _is_claim(path: Path) -> bool:
    """Return whether a file is the lock of a model's metrics (metrics/claim.py).

    Its name does not say whose it is. A stub that another worker's test has killed leaves it to the next start.
    """
    return path.name.endswith("_metrics")


def _is_another_workers(process: psutil.Process) -> bool:
    environment = process.environ()
    return _WORKER[1] in environment and any(environment.get(name) != os.environ.get(name) for name in _WORKER)


def wait_for_none(before: set[str]) -> None:
    """Return once nothing is left that was not there ``before``; somebody else's server may just end."""

    def left() -> set[str]:
        return leftovers(os.getpid()) - before

    wait_for(lambda: not left(), lambda: f"the end of what is left behind: {sorted(left())}", longest_pause=0.2)


def shown(process: psutil.Process) -> str:
    """A process by name and id."""
    return f"{name_of(process)} ({process.pid})".lstrip()


def name_of(process: psutil.Process) -> str:
    """Return the name of a process, or nothing if it has just ended."""
    with contextlib.suppress(psutil.Error):
        return process.name()
    return ""
