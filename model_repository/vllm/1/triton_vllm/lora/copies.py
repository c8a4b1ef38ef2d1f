"""Look at the files of a LoRA adapter, and copy them for vLLM.

A private copy cannot change while vLLM reads it. vLLM maps the weights into memory; if a mapped
file becomes shorter, vLLM's process ends. vLLM may also drop an adapter from memory. When a request
needs it again, vLLM reads the files in the middle of a step, and ends if they are missing.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import shutil
import stat
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from triton_vllm.base.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import MutableMapping

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAMES = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""In vLLM's order: it reads the first one that exists."""
SPARE_BYTES = 64 << 20
"""Bytes that a copy leaves free in the temporary folder, for other programs."""
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class File:
    """A file of an adapter, as it was found.

    Attributes:
        path: the path without links.
        name: the file's name in the adapter's folder.
        size: bytes.
        state: device, inode, and the times in ns when the contents and the inode changed.
    """

    path: Path
    name: str
    size: int
    state: tuple[int, int, int, int]


@dataclass(frozen=True, eq=False)
class Copy:
    """A private copy of an adapter.

    Attributes:
        folder: contains the files. It exists at least as long as this object.
        digest: the files' digest.
        removable: bytes that become free when this object is deleted.
    """

    folder: Path
    digest: str
    removable: int


def look(folder: Path, within: Path | None = None) -> tuple[File, ...]:
    """Return the configuration and the weights of an adapter; empty if one of them is missing.

    Args:
        folder: the adapter's folder.
        within: the files must be in this folder, even if links lead elsewhere. None means anywhere.
    """
    config = _find(folder, CONFIG_NAME, within)
    for name in WEIGHTS_NAMES:
        weights = _find(folder, name, within)
        if config and weights:
            return (config, weights)
    return ()


class Copies:
    """The copies of adapters that vLLM may read, one for each content.

    The same folder has the operators' requests to load an adapter again: a file for each adapter
    with a byte for each request.

    Args:
        shared: the folder of all instances that share an engine. If None, this process has its own
            folder.
    """

    def __init__(self, shared: Path | None = None) -> None:
        # `gen_vllm_env.sh clean` removes folders of this name that no server uses.
        self._own = tempfile.TemporaryDirectory(
            prefix="vllm_env_server_lora_", ignore_cleanup_errors=True
        )
        # Instances share a folder because vLLM takes different paths for different adapters. Copies
        # in it stay: another instance may use them.
        self._folder = shared or Path(self._own.name)
        self._is_shared = shared is not None
        # By digest. An entry vanishes when no code holds the copy any more.
        self._made: MutableMapping[str, Copy] = weakref.WeakValueDictionary()
        # for the names of folders
        self._numbers = itertools.count()

    def missing(self, files: tuple[File, ...]) -> int:
        """Return how many bytes are missing for a new copy; 0 or less if there is room."""
        return sum(file.size for file in files) + SPARE_BYTES - shutil.disk_usage(self._folder).free

    def note_reload(self, name: str) -> None:
        """Make each instance load an adapter again before its next request for it.

        Raises:
            OSError: the note cannot be written.
        """
        with self._reloads_of(name).open("ab") as file:
            file.write(b".")

    def reloads(self, name: str) -> int:
        """Return how often ``note_reload`` was called for an adapter, in all instances."""
        try:
            return self._reloads_of(name).stat().st_size
        except FileNotFoundError:
            return 0

    async def make(self, files: tuple[File, ...]) -> Copy:
        """Return a copy of an adapter's files; an existing copy if the contents are the same.

        Raises:
            UnavailableError: a file has changed since ``look``.
            OSError: a file cannot be read, or the disk is full.
        """
        with tempfile.TemporaryDirectory(prefix="new-", dir=self._folder) as staging:
            new = Path(staging, "adapter")
            digest = await asyncio.to_thread(_copy, files, new)
            size = sum(file.size for file in files)
            return self._made.get(digest) or self._keep(new, digest, size)

    def _keep(self, new: Path, digest: str, size: int) -> Copy:
        """Move a new copy out of its temporary place, which `make` removes; return it.

        Args:
            new: the folder with the files.
            digest: the files' digest.
            size: the files' bytes.

        Raises:
            OSError: the folder cannot be moved.
        """
        if self._is_shared:
            copy = Copy(self._folder / digest, digest, removable=0)
            try:
                new.rename(copy.folder)
            except OSError:
                # If the folder exists, another instance was first, with the same contents.
                if not copy.folder.exists():
                    raise
        else:
            # Numbered, because an earlier copy of the same contents may be being removed right now.
            folder = self._folder / f"{digest}-{next(self._numbers)}"
            copy = Copy(new.rename(folder), digest, removable=size)
            # The folder is removed when no code holds the copy any more.
            weakref.finalize(copy, shutil.rmtree, folder, ignore_errors=True)
        self._made[digest] = copy
        return copy

    def _reloads_of(self, name: str) -> Path:
        # A client chooses the name.
        return self._folder / f"reloads-{hashlib.sha256(name.encode()).hexdigest()}"

    def close(self) -> None:
        """Remove the copies if the folder is this process's own; vLLM must have ended."""
        self._own.cleanup()


def _find(folder: Path, name: str, within: Path | None) -> File | None:
    """Return a file of an adapter; None if it is missing or outside of the folder ``within``."""
    try:
        path = (folder / name).resolve(strict=True)
        status = path.stat()
        inside = within is None or path.is_relative_to(within.resolve(strict=True))
    except (OSError, RuntimeError):  # before Python 3.13, a loop of links raises RuntimeError
        return None
    if not inside or not stat.S_ISREG(status.st_mode):
        return None
    return File(path, name, status.st_size, _state(status))


def _state(status: os.stat_result) -> tuple[int, int, int, int]:
    """Return what changes whenever a file is changed or replaced."""
    # The contents' time alone is not enough: archives and images set it. Nor is the inode: a new
    # file may get the inode of the file that it replaces.
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def _copy(files: tuple[File, ...], target: Path) -> str:
    """Copy files into a new folder and return the digest of their names and contents."""
    target.mkdir()
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{file.size}\0".encode())
        with open(file.path, "rb", opener=_open) as source, (target / file.name).open("xb") as copy:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                copy.write(chunk)
            # The file may have been replaced after `look`, or changed while it was read.
            if _state(os.fstat(source.fileno())) != file.state or copy.tell() != file.size:
                raise UnavailableError(f"LoRA file {file.name} is being written; try again later")
    return digest.hexdigest()


def _open(path: str, flags: int) -> int:
    # A link may have replaced the file; it is refused. A pipe may have; opening it would wait for
    # ever without O_NONBLOCK.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
