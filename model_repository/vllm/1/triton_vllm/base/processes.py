"""Tell processes apart."""

from __future__ import annotations

from pathlib import Path


def process_space() -> str:
    """Return the range in which a process id is unique: a machine's boot and a namespace of process ids.

    vLLM gives its workers on other machines of a Ray cluster all variables of EngineCore. The
    owner's id means nothing there.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def start_time(process: int) -> str:
    """Return when a process was started; its id alone may belong to another process later."""
    try:
        # Field 22 of proc(5), counted after the name, which may contain spaces and parentheses.
        return (
            Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
        )
    except (OSError, IndexError):
        return ""
