"""Which processes belong to a server, also when their parents are gone, and how to end them.

vLLM's ``EngineCore`` and ``Worker`` outlive a dead stub as orphans and hold memory, so the parent's id is no way to
find them. Three things are: the session that the server leads and that its children inherit; a variable in the
environment (which setproctitle may overwrite); and the process tree as it was when somebody last looked.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

MARKER = "VLLM_ENV_SERVER_ID"
_PROC = Path("/proc")
# Extracted environments (the path is hard-coded in python_backend's src/pb_env.cc), and the shared memory that
# Python's multiprocessing makes for vLLM; a killed process removes neither.
_TRACES = re.compile(rb"/tmp/python_env_\w+|/dev/shm/(?:psm_|sem\.mp-)\w+")


@dataclass(frozen=True)
class Process:
    """A process by id; ``started`` (clock ticks since boot) tells it from a later one with the same id."""

    pid: int
    name: str
    parent: int
    session: int
    started: int
    zombie: bool

    def __str__(self) -> str:
        return f"{self.name} ({self.pid})"


def processes() -> list[Process]:
    """Returns all processes that can be seen, zombies included."""
    found = (read_process(int(entry.name)) for entry in _PROC.iterdir() if entry.name.isdigit())
    return [process for process in found if process]


def read_process(pid: int) -> Process | None:
    """Returns the process with this id, or None if there is none."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    before, _, after = stat.rpartition(")")  # a name may hold spaces and brackets
    fields = after.split()  # proc(5): state, ppid, pgrp, session, …, starttime is the 20th here
    return Process(
        pid=pid,
        name=before.partition("(")[2],
        parent=int(fields[1]),
        session=int(fields[3]),
        started=int(fields[19]),
        zombie=fields[0] in "ZX",
    )


def members(leader: int, marker: str, known: Iterable[Process] = ()) -> list[Process]:
    """Returns the living processes of one server, except zombies.

    Args:
        leader: id of the server's process, which leads a session of its own.
        marker: value of the variable ``VLLM_ENV_SERVER_ID`` in the server's environment.
        known: processes that were members before.
    """
    everyone = {process.pid: process for process in processes()}
    chosen = {p.pid for p in known if everyone.get(p.pid) and everyone[p.pid].started == p.started}
    chosen |= {p.pid for p in everyone.values() if p.session == leader or _is_marked(p.pid, marker)}
    grown = True
    while grown:
        children = {p.pid for p in everyone.values() if p.parent in chosen} - chosen
        chosen |= children
        grown = bool(children)
    return [p for p in everyone.values() if p.pid in chosen and not p.zombie and p.pid != os.getpid()]


def _is_marked(pid: int, marker: str) -> bool:
    with contextlib.suppress(OSError):
        return f"{MARKER}={marker}".encode() in (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    return False


def traces(group: Iterable[Process]) -> set[Path]:
    """Returns the folders ``/tmp/python_env_XXXXXX`` and the shared memory that these processes use or are writing."""
    found: set[bytes] = set()
    for process in group:
        folder = _PROC / str(process.pid)
        for source in ("environ", "maps", "cmdline"):
            with contextlib.suppress(OSError):
                found |= set(_TRACES.findall((folder / source).read_bytes()))
        with contextlib.suppress(OSError):  # while it extracts, the server works in the folder
            found |= set(_TRACES.findall(os.fsencode((folder / "cwd").readlink())))
    return {Path(os.fsdecode(path)) for path in found}


def end(group: Iterable[Process], *, grace: float) -> None:
    """Ends processes: SIGTERM, and SIGKILL to those that are still there after ``grace`` seconds."""
    left = list(group)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, number)
        left = wait_gone(left, timeout=grace)


def wait_gone(group: Iterable[Process], *, timeout: float) -> list[Process]:
    """Waits until the processes are gone; returns those that are not after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    left = [process for process in group if _lives(process)]
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = [process for process in left if _lives(process)]
    return left


def _lives(process: Process) -> bool:
    now = read_process(process.pid)
    return now is not None and now.started == process.started and not now.zombie
