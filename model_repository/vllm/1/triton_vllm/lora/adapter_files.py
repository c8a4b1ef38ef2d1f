"""Find a LoRA adapter below the operator's directory, and copy it so that nobody changes it while vLLM reads it.

vLLM maps the weights into memory, where a file that becomes shorter ends its process, and reads an adapter again in the middle of
a step if it has had to make room for others.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""In vLLM's order: it reads the first that is there."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_CHUNK = 1 << 20


class ChangedError(Exception):
    """A file changes while it is read."""


@dataclass(frozen=True)
class File:
    """A file of an adapter as it was seen.

    Attributes:
        name: in its folder.
        path: without links.
        seen: its device, inode, size in bytes, and the times in ns at which its contents and its inode changed: archives and
            images set the first one, and a new file may have the number of the one that it replaces.
    """

    name: str
    path: Path
    seen: tuple[int, int, int, int, int]


def is_name(name: str) -> bool:
    """Return whether a request's name can be that of a folder directly below a directory: one component, no hidden one."""
    return _NAME.fullmatch(name) is not None


def look(directory: Path, name: str) -> tuple[File, ...]:
    """Return the configuration and the weights of an adapter; nothing if it has none, or not within the directory.

    Args:
        directory: the operator's; links in it may point to what is within it.
        name: one for which `is_name` is true.
    """
    try:
        root = directory.resolve(strict=True)
    except OSError:
        return ()
    config = _find(root, name, CONFIG)
    weights = next((found for file in WEIGHTS if (found := _find(root, name, file))), None)
    return (config, weights) if config and weights else ()


def copy(files: tuple[File, ...], target: Path) -> str:
    """Copy an adapter's files into a new folder and return the digest of their contents.

    Raises:
        ChangedError: a file is no longer what `look` has found.
        OSError: a file cannot be read, or there is no space.
    """
    target.mkdir(mode=0o700)
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{file.seen[2]}\0".encode())
        _copy(file, target / file.name, digest)
    return digest.hexdigest()


def _find(root: Path, name: str, file: str) -> File | None:
    try:
        path = (root / name / file).resolve(strict=True)
        status = path.stat()
    except (OSError, RuntimeError):  # a circle of links is a RuntimeError before Python 3.13
        return None
    if not path.is_relative_to(root) or not stat.S_ISREG(status.st_mode):
        return None
    return File(file, path, _seen(status))


def _seen(status: os.stat_result) -> tuple[int, int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _copy(file: File, target: Path, digest: hashlib._Hash) -> None:
    # a link put in its place since, or a pipe, which would wait for ever, is not opened
    source = os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(source, "rb") as given, target.open("xb") as made:
        while chunk := given.read(_CHUNK):
            digest.update(chunk)
            made.write(chunk)
        if _seen(os.fstat(source)) != file.seen or made.tell() != file.seen[2]:
            raise ChangedError(file.name)
