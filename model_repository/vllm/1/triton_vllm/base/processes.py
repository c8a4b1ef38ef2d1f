"""Which process is which."""

from __future__ import annotations

from pathlib import Path


def process_space() -> str:
    """Return where a process id means the same process: a boot of a machine and a namespace of process ids.

    vLLM gives its workers on other machines of a Ray cluster all variables of EngineCore, where no process has the owner's id.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def start_time(process: int) -> str:
    """Return when a process was started, for its id may be another's later."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
