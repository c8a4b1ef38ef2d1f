"""The user's cache folder: what the stages made, by content key, and bounded.

    locks/KEY.lock        requirements resolved for a spec that has no lock file beside it
    conda/                packages and the local channel
    prefixes/KEY/         conda prefixes with their wheels
    archives/KEY.tar.gz   packed prefixes
    stubs/KEY/            stubs built from source
    standins/KEY/         models for the smoke run
    warm/KEY/             served models' private copies of vLLM's caches (triton_vllm/warm_cache.py)
    build/                what a running build stages; left behind only by SIGKILL

An entry appears by rename, so it is whole or not there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_env.serve.leftovers import server_runs

from .errors import SPACE_REMEDY, VllmEnvError
from .mounts import mounts_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_LIMIT_BYTES = 40 * 2**30
_KINDS = ("prefixes/*", "archives/*.json", "stubs/*", "standins/*", "wheels/*", "sources/*", "verified/*", "warm/*")
_STAGED = "vllm_env-"
_STAGED_NAME = re.compile(rf"{_STAGED}\w{{8}}")


def cache_root() -> Path:
    """Return the cache folder: ``VLLM_ENV_CACHE``, else ``vllm_env`` below ``XDG_CACHE_HOME`` or ``~/.cache``."""
    own = os.environ.get("VLLM_ENV_CACHE")
    return Path(own).absolute() if own else default_root()


def default_root() -> Path:
    """Return the cache folder that served models take, which know nothing of ``VLLM_ENV_CACHE``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "vllm_env"


def key_of(*parts: Any) -> str:
    """Return the content key of JSON-serialisable parts: 32 hexadecimal digits of a SHA-256."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(stream)


def _digest(stream: Any) -> str:  # Python 3.10 has no hashlib.file_digest
    digest = hashlib.sha256()
    while chunk := stream.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


@contextlib.contextmanager
def staging(root: Path) -> Iterator[Path]:
    """Give a new folder below ``root/build``, locked as long as it is used, that is removed afterwards."""
    build = root / "build"
    build.mkdir(parents=True, exist_ok=True)
    with locked_folder(build, _STAGED) as folder:
        try:
            yield folder
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise VllmEnvError(
                f"No space left in {root}.", cause=f"{error.strerror}: {error.filename or folder}.", remedy=SPACE_REMEDY
            ) from error


@contextlib.contextmanager
def locked_folder(place: Path, prefix: str) -> Iterator[Path]:
    """Give a new folder in ``place``, locked (flock) as long as it is used, and remove it afterwards.

    The lock tells a living owner from a dead one. The id of its process would not: two containers that share a repository
    or a cache do not see each other's processes, and the builder is often process 1 in both.
    """
    with contextlib.ExitStack() as stack:
        folder = place
        while folder == place or not folder.exists():  # until it is locked, another build may take it for abandoned
            folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
            stack.callback(remove_tree, folder)
            with contextlib.suppress(FileNotFoundError):
                stack.callback(os.close, _lock(folder, fcntl.LOCK_EX))
        yield folder


def _lock(folder: Path, operation: int) -> int:
    """Lock a folder and return the handle that holds it.

    Raises:
        OSError: it is gone, may not be read, or is locked and ``operation`` has LOCK_NB.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, operation)
    except BaseException:
        os.close(handle)
        raise
    return handle


def remove_unlocked(folder: Path, *, dry_run: bool = False) -> bool:
    """Remove a folder that ``locked_folder`` gave to a process which has ended; return whether it is gone, or would be."""
    try:
        handle = _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    try:
        if not dry_run:
            remove_tree(folder)
    finally:
        os.close(handle)
    return dry_run or not folder.exists()


def remove_tree(path: Path) -> None:
    """Remove a folder and all it holds; nothing happens when it is not there, or when something is mounted in it.

    A volume that a person has mounted there would be emptied, and its mount point would stay all the same.
    """
    if not mounts_in(path):
        shutil.rmtree(path, ignore_errors=True)


def abandoned(root: Path) -> list[Path]:
    """Return the staging folders whose owner no longer runs."""
    folders = (root / "build").glob("*-*")
    return [f for f in folders if _STAGED_NAME.fullmatch(f.name) and remove_unlocked(f, dry_run=True)]


def remove_abandoned(root: Path) -> list[Path]:
    """Remove staging folders whose owner no longer runs; return what was removed."""
    return [folder for folder in abandoned(root) if remove_unlocked(folder)]


def touch(path: Path) -> None:
    """Mark an entry as used now; the least recently used ones are evicted first."""
    with contextlib.suppress(OSError):
        os.utime(path)


@dataclass(frozen=True)
class Entry:
    """What the cache holds under one key: its files, the time of its last use (s since 1970) and its size in bytes."""

    paths: tuple[Path, ...]
    used: float
    size: int

    def remove(self) -> None:
        """Free the entry."""
        for path in self.paths:
            remove_tree(path) if path.is_dir() else path.unlink(missing_ok=True)


def entries(root: Path) -> list[Entry]:
    """Return the cache's entries, the least recently used first."""
    found = []
    for path in (p for kind in _KINDS for p in root.glob(kind)):
        paths = (path, path.with_suffix(".tar.gz")) if path.suffix == ".json" else (path,)
        found.append(Entry(paths, path.stat().st_mtime, sum(tree_size(p) for p in paths)))
    return sorted(found, key=lambda entry: entry.used)


def tree_size(path: Path) -> int:
    """Return the size in bytes of a file, or of all files below a folder; 0 if there is nothing."""
    if not path.is_dir():
        return path.stat().st_size if path.exists() else 0
    return sum(f.lstat().st_size for f in path.rglob("*") if not f.is_dir())


def evict(root: Path, keep: set[Path], limit: int = _LIMIT_BYTES) -> None:
    """Free the least recently used entries, but none that holds one of ``keep``, until ``limit`` bytes are left.

    While a server runs in this container, its private copies of vLLM's caches stay: they are marked as used at its start only.
    """
    marker = root / ".evicted"
    with contextlib.suppress(OSError):
        if time.time() - marker.stat().st_mtime < 3600:  # measuring tens of GB takes seconds: once an hour is enough
            return
    known = entries(root)
    total = sum(entry.size for entry in known)
    kept = keep.union((root / "warm").glob("*") if server_runs() else ())
    for entry in known:
        if total <= limit:
            break
        if not kept.intersection(entry.paths):
            entry.remove()
            total -= entry.size
    marker.touch()


@contextlib.contextmanager
def exclusive(root: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the cache for one build at a time; ``waiting`` is called once if another build holds it."""
    root.mkdir(parents=True, exist_ok=True)
    with filelock_of(root / "build.lock", waiting):
        yield


@contextlib.contextmanager
def filelock_of(file: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold an advisory lock (flock) on a file or folder; the kernel releases it when the process ends, however it ends."""
    flags = os.O_RDONLY if file.is_dir() else os.O_RDWR | os.O_CREAT
    handle = os.open(file, flags | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
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
