"""Measure the CPU seconds and the memory of a server's processes by role."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Text in a process's name or command line -> its role.
_ROLES = {
    "EngineCore": "engine_core",
    "VLLM::APIServer": "api_server",
    "VLLM::": "worker",
    "python_backend_stub": "stub",
    "tritonserver": "server",
    "api_server": "api_server",
    "engine_worker": "engine",
}


def session_of(leader: int) -> list[psutil.Process]:
    """Return the living processes of the session whose leader has the process id ``leader``."""
    found = []
    for process in psutil.process_iter():
        # A process may end at any time.
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def role_of(process: psutil.Process) -> str:
    """Return the role of a process: a value of ``_ROLES``, or ``other``."""
    words = " ".join([process.name(), *process.cmdline()])
    # The first match counts, so "VLLM::APIServer" comes before "VLLM::".
    return next((role for sign, role in _ROLES.items() if sign in words), "other")


def by_role(leader: int, amount: Callable[[psutil.Process], float]) -> dict[str, float]:
    """Return the sum of an amount over the processes of a session, by role.

    Args:
        leader: process id of the process that leads the session.
        amount: returns the amount of one process, such as ``cpu_seconds``.
    """
    used: dict[str, float] = defaultdict(float)
    for process in session_of(leader):
        with contextlib.suppress(psutil.NoSuchProcess):
            used[role_of(process)] += amount(process)
    return dict(used)


def cpu_seconds(process: psutil.Process) -> float:
    """Return the processor time that a process has used (s)."""
    used = process.cpu_times()
    return used.user + used.system


def resident(process: psutil.Process) -> int:
    """Return the resident memory of a process in bytes, with its share of shared pages (PSS).

    So a sum over processes counts each page once.
    """
    # psutil would read all of smaps, one paragraph for each mapping.
    rollup = Path(f"/proc/{process.pid}/smaps_rollup")
    try:
        found = re.search(r"^Pss: +(\d+) kB$", rollup.read_text("ascii"), re.MULTILINE)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise psutil.NoSuchProcess(process.pid) from error
    # A process that ends just now has none left.
    return 1024 * int(found[1]) if found else 0


@contextlib.contextmanager
def first_in_line() -> Iterator[bool]:
    """Let this thread run before the servers during the block; yield whether that is allowed."""
    # A load generator that waits for a core later reads many pieces at once, and records them as
    # one burst.
    policy = os.sched_getscheduler(0)
    parameters = os.sched_getparam(0)
    try:
        # A real-time policy is necessary. By default the kernel groups processes by session, and
        # then nice counts only within a session.
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    # Setting the policy takes root, or CAP_SYS_NICE.
    except PermissionError:
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setscheduler(0, policy, parameters)


def exit_on_sigterm() -> None:
    """From now on, exit with status 143 at the first SIGTERM.

    SystemExit runs the ``finally`` blocks, which stop the servers.
    """

    def leave(*_: object) -> None:
        # `timeout` sends a second one to the process group, which must not interrupt the stopping.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(143)

    signal.signal(signal.SIGTERM, leave)


def end_session(leader: int, patience_s: float = 30) -> None:
    """End all processes of the session of ``leader``, after ``patience_s`` seconds by force.

    Args:
        leader: process id of the process that leads the session.
        patience_s: how long to wait for them.
    """
    # 1) The leader, which ends its own processes
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(leader).terminate()
    psutil.wait_procs(session_of(leader), timeout=patience_s)
    # 2) What is left: vLLM's processes survive a stub that died
    for process in session_of(leader):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
