"""Mount points below a folder: what lies in them is a volume of the person's, to be neither moved, copied nor removed."""

from __future__ import annotations

import os
import re
from pathlib import Path

_MOUNTINFO = Path("/proc/self/mountinfo")


def mounts_in(folder: Path) -> list[Path]:
    """Return the mount points at and below a folder, resolved.

    The kernel's list is read because os.path.ismount() compares st_dev, which a bind mount of the same file system shares
    with what is around it, and because a file can be a mount point too.
    """
    place = folder.resolve()
    lines = _MOUNTINFO.read_bytes().strip().split(b"\n")
    points = [_unescaped(line.split(b" ")[4]) for line in lines]
    return [point for point in points if point.is_relative_to(place)]


def _unescaped(field: bytes) -> Path:
    """Undo proc(5)'s writing of spaces, tabs, newlines and backslashes as octal numbers."""
    return Path(os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), field)))
