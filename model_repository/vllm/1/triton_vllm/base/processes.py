"""Tell processes apart."""

from __future__ import annotations

from pathlib import Path


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


def _field(process: int, number: int) -> str:
    """Return a field of ``/proc/PID/stat``, from the third on; empty if the process has ended."""
    try:
        status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
        # The fields of proc(5). We count after the name, which may contain spaces and parentheses.
        return status.rpartition(")")[2].split()[number - 3]
    except (OSError, IndexError):
        return ""
