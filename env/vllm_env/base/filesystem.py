"""Files, folders and mount points."""

import hashlib
import os
import re
import shutil
import stat
from pathlib import Path
from typing import Any

from .errors import SPACE_REMEDY, VllmEnvError

_MOUNTINFO = Path("/proc/self/mountinfo")


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(stream)


def _digest(stream: Any) -> str:  # Python 3.10 has no hashlib.file_digest
    digest = hashlib.sha256()
    while chunk := stream.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def tree_size(path: Path) -> int:
    """Return the size in bytes of a file, or of all files below a folder; 0 if there is nothing."""
    if not path.is_dir():
        return path.stat().st_size if path.exists() else 0
    return sum(f.lstat().st_size for f in path.rglob("*") if not f.is_dir())


def remove_tree(path: Path) -> None:
    """Remove a folder and all it holds; do nothing if it does not exist, or if something is mounted in it.

    A volume that the user has mounted there would be emptied, and its mount point would stay all the same.
    """
    if not mounts_in(path):
        shutil.rmtree(path, ignore_errors=True)


def link_or_copy(source: str, target: str) -> None:
    """Hard-link a file, or a link itself; copy it where that is not possible."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # no hard links here, or a file of another owner under fs.protected_hardlinks
        shutil.copy2(source, target, follow_symlinks=False)


def write_whole(file: Path, text: str) -> None:
    """Write a text file, which appears whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.new")
    temporary.write_text(text, "utf-8")
    temporary.replace(file)


def let_read(path: Path) -> None:
    """Let every user read a file or enter a folder, whatever the umask: the server may be another user's."""
    mode = path.stat().st_mode
    path.chmod(stat.S_IMODE(mode) | (0o555 if mode & stat.S_IXUSR else 0o444))


def make_readable(folder: Path) -> None:
    """Let every user read a folder and all below it; links stay as they are."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            let_read(path)


def sync(path: Path) -> None:
    """Write a file or a folder through to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def require_space(folder: Path, needed: int, purpose: str, remedy: str = SPACE_REMEDY) -> None:
    """Refuse early when a file system has less than ``needed`` bytes free.

    Raises:
        VllmEnvError: the file system of ``folder`` is too full for ``purpose``.
    """
    existing = folder
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise VllmEnvError(
            f"No space: {purpose} needs {needed / 1e9:.1f} GB in {folder}, and {free / 1e9:.1f} GB are free.",
            remedy=remedy,
        )


def mounts_in(folder: Path) -> list[Path]:
    """Return the mount points at and below a folder, resolved.

    What lies in them is a volume of the user's, to be neither moved, copied nor removed. The kernel's list is read because
    os.path.ismount() compares st_dev, which a bind mount of the same file system shares with what is around it, and
    because a file can be a mount point too.
    """
    place = folder.resolve()
    lines = _MOUNTINFO.read_bytes().strip().split(b"\n")
    points = [_unescaped(line.split(b" ")[4]) for line in lines]
    return [point for point in points if point.is_relative_to(place)]


def _unescaped(field: bytes) -> Path:
    """Undo the octal numbers in which proc(5) writes spaces, tabs, newlines and backslashes."""
    return Path(os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), field)))
