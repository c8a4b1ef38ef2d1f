"""Who uses the processor: CPU seconds and memory of a server's processes, read from /proc."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Process:
    """One process: its role, CPU seconds since it started, resident bytes."""

    pid: int
    role: str
    cpu_s: float
    resident: int


def session_of(leader: int) -> list[Process]:
    """Return the living processes of the session that `leader` leads (a server started with its own session)."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        process = _read(int(folder.name), leader)
        if process is not None:
            found.append(process)
    return found


def _read(pid: int, leader: int) -> Process | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return None
    fields = stat[stat.rindex(")") + 2 :].split()  # from field 3 on, see proc(5)
    if int(fields[3]) != leader or fields[0] == "Z":
        return None
    name = stat[stat.index("(") + 1 : stat.rindex(")")]
    cpu = (int(fields[11]) + int(fields[12])) / _TICKS
    return Process(pid, role_of(name, command), cpu, int(fields[21]) * _PAGE)


def role_of(name: str, command: str) -> str:
    """Return what a process is to the benchmark: server, stub, api_server, engine, engine_core, worker or other."""
    for sign, role in (
        ("EngineCore", "engine_core"),
        ("VLLM::APIServer", "api_server"),
        ("VLLM::", "worker"),
        ("python_backend_stub", "stub"),
        ("tritonserver", "server"),
        ("api_server", "api_server"),
        ("engine_worker", "engine"),
    ):
        if sign in command or sign in name:
            return role
    return "other"


def cpu_by_role(leader: int) -> dict[str, float]:
    """Return CPU seconds used so far in the session of `leader`, added up by role."""
    used: dict[str, float] = {}
    for process in session_of(leader):
        used[process.role] = used.get(process.role, 0.0) + process.cpu_s
    return used


def resident_by_role(leader: int) -> dict[str, int]:
    """Return resident bytes in the session of `leader`, added up by role."""
    used: dict[str, int] = {}
    for process in session_of(leader):
        used[process.role] = used.get(process.role, 0) + process.resident
    return used


@contextlib.contextmanager
def first_in_line() -> Iterator[bool]:
    """Let this thread run before the servers within, if it may (root, CAP_SYS_NICE); yield whether it does.

    A load generator that waits for a core reads many pieces at once and takes them for one burst. By a real-time policy:
    where the kernel groups processes by session, as it does by default, nice counts within a session only.
    """
    policy, parameters, allowed = os.sched_getscheduler(0), os.sched_getparam(0), True
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        allowed = False
    try:
        yield allowed
    finally:
        if allowed:
            os.sched_setscheduler(0, policy, parameters)


def exit_on_sigterm() -> None:
    """Leave by SystemExit at the first SIGTERM, so that servers are stopped; a second one, as `timeout` sends, is ignored."""

    def leave(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(143)

    signal.signal(signal.SIGTERM, leave)


def end_session(leader: int, patience_s: float = 30) -> None:
    """End the session of `leader`: SIGTERM to the leader, SIGKILL to what is left after `patience_s`."""
    _signal(leader, signal.SIGTERM)
    limit = time.monotonic() + patience_s
    while session_of(leader) and time.monotonic() < limit:
        time.sleep(0.2)
    for process in session_of(leader):
        _signal(process.pid, signal.SIGKILL)


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
