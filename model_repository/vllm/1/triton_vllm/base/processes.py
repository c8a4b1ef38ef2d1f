"""Tell processes apart."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    import psutil

_END_S = 10.0
"""How long a killed process may take to free its GPU and its ports, s."""


def process_space() -> str:
    """Return the range in which a process id is unique: a machine's boot and a namespace of ids.

    The result is empty if the kernel does not say. If two processes get different results, the id
    of the one means nothing to the other.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def start_time(process: int) -> str:
    """Return when a process was started, in clock ticks since boot; empty if it has ended.

    A process id alone may belong to another process later.
    """
    return _field(process, 22)


def is_stopped(process: int) -> bool:
    """Return whether a process stands still: stopped by a signal, or held by a debugger."""
    return _field(process, 3) in {"T", "t"}


def descendants() -> list[psutil.Process]:
    """Return the processes that this one has started, with all their children."""
    # Imported here because an environment in parts is unpacked after this module is imported.
    import psutil

    with contextlib.suppress(psutil.Error):
        return psutil.Process().children(recursive=True)
    return []


def end_orphans(processes: Iterable[psutil.Process]) -> None:
    """Kill those of the processes that are no longer descendants of this one.

    Args:
        processes: what ``descendants`` has returned while the parents of all lived.
    """
    import psutil

    ours = set(descendants())
    orphans = [process for process in processes if process not in ours and _can_be_killed(process)]
    for orphan in orphans:
        with contextlib.suppress(psutil.Error):
            orphan.kill()
    psutil.wait_procs(orphans, timeout=_END_S)


def _can_be_killed(process: psutil.Process) -> bool:
    """Return whether a process runs, and does not end by itself after those that it serves."""
    import psutil

    try:
        # Python's resource tracker removes the shared memory of killed processes, and ends.
        return process.is_running() and "resource_tracker" not in " ".join(process.cmdline())
    except psutil.Error:
        return False


def _field(process: int, number: int) -> str:
    """Return a field of ``/proc/PID/stat``, from the third on; empty if the process has ended."""
    try:
        status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
        # The fields of proc(5). We count after the name, which may contain spaces and parentheses.
        return status.rpartition(")")[2].split()[number - 3]
    except (OSError, IndexError):
        return ""
