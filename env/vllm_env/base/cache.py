"""The cache folder: the results of the stages, by content key, with a limit on its size.

    locks/KEY/            locks of specs that have no lock file next to them
    conda/                packages and the local channel
    wheels/, sources/     pinned wheels and the sources that they are built from
    prefixes/KEY/         conda prefixes with their wheels
    archives/KEY.tar.gz   packed prefixes
    stubs/KEY/            stubs built from source
    standins/KEY/         models for the smoke run
    verified/KEY          environments that passed on this machine
    warm/KEY/             served models' private copies of vLLM's caches (triton_vllm's warm_cache.py)
    build/                staging folders of running builds; only SIGKILL leaves one behind

An entry is renamed into place, so it is either complete or absent.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import SPACE_REMEDY, VllmEnvError
from .filesystem import give_tree, is_writable, owner_of, remove_tree, tree_size
from .locks import locked_folder, remove_unlocked

# The cache may use 40 GiB; ``evict`` frees the entries that were used longest ago.
_LIMIT_BYTES = 40 * 2**30
_KINDS = (
    "prefixes/*",
    "archives/*.json",
    "stubs/*",
    "standins/*",
    "wheels/*",
    "sources/*",
    "verified/*",
    "warm/*",
)
# A plan reads these; a dry run sees them as links.
_PLANNED_WITH = (
    "locks/*/*",
    "wheels/*/*",
    "stubs/*/*",
    "conda/layer-*.json",
    "conda/channel/*/*",
    "conda/conda-forge/*/*",
)
_STAGED = "vllm_env-"
_STAGED_NAME = re.compile(rf"{_STAGED}\w{{8}}")


def key_of(*parts: Any) -> str:
    """Return the content key of JSON-serialisable parts: 32 hexadecimal digits of a SHA-256."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def cache_root(*, only_read: bool = False) -> Path:
    """Return the cache folder: ``VLLM_ENV_CACHE``, else ``vllm_env`` below ``XDG_CACHE_HOME`` or ``~/.cache``.

    Raises:
        VllmEnvError: the folder cannot be written, and ``only_read`` is false.
    """
    own = os.environ.get("VLLM_ENV_CACHE")
    root = Path(own).absolute() if own else default_root()
    if not only_read and not is_writable(root):
        remedy = "Name a folder that can be written: VLLM_ENV_CACHE=DIR."
        raise VllmEnvError(
            f"The cache folder {root} cannot be written by user {os.geteuid()}.", remedy=remedy
        )
    return root


def default_root() -> Path:
    """Return the default cache folder. Served models always use it, because they do not know ``VLLM_ENV_CACHE``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "vllm_env"


def settle_home(caches: Path) -> None:
    """Move all caches, including uv's and pip's, if ``~/.cache`` cannot be written.

    They go to ``VLLM_ENV_CACHE`` if it is set, else to ``caches``. A container needs this for a user whom its
    ``/etc/passwd`` does not list: the home of such a user is ``/``.
    """
    place = Path(os.environ.get("VLLM_ENV_CACHE") or caches).absolute()
    try:
        Path.home()
    except RuntimeError:
        os.environ["HOME"] = "/"
    if not is_writable(default_root()) and is_writable(place):
        os.environ["XDG_CACHE_HOME"] = str(place)


def give_cache() -> None:
    """Give files that root wrote into a user's cache to that user, whose builds could not take the locks otherwise."""
    if os.geteuid() == 0:
        with contextlib.suppress(
            VllmEnvError, OSError
        ):  # another container's build may remove its staging folder meanwhile
            root = cache_root()
            owner = max(owner_of(root), owner_of(root.parent), key=lambda owner: owner.uid != 0)
            if owner.uid != 0 and root.is_dir():
                give_tree(root, owner)


@dataclass(frozen=True)
class Entry:
    """One entry of the cache: its files, the time of its last use (s since 1970) and its size in bytes."""

    paths: tuple[Path, ...]
    used: float
    size: int

    def remove(self) -> None:
        """Delete the files of the entry."""
        for path in self.paths:
            remove_tree(path) if path.is_dir() else path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Cache:
    """A cache folder, which need not exist yet."""

    root: Path

    def path(self, kind: str, *names: str) -> Path:
        """Return the path of an entry of a kind, such as ``prefixes``."""
        return self.root.joinpath(kind, *names)

    def linked_in(self, folder: Path) -> "Cache":
        """Return a new cache in ``folder`` with links to those files of this cache that a plan reads.

        Only files are linked. A new or replaced file in the new cache therefore does not reach this one.
        """
        for file in (file for pattern in _PLANNED_WITH for file in self.root.glob(pattern)):
            link = folder / file.relative_to(self.root)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file)
        return Cache(folder)

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """Yield a new folder below ``build/``. It is locked while the block runs, and removed afterwards."""
        build = self.path("build")
        build.mkdir(parents=True, exist_ok=True)
        with locked_folder(build, _STAGED) as folder:
            try:
                yield folder
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                cause = f"{error.strerror}: {error.filename or folder}."
                raise VllmEnvError(
                    f"No space left in {self.root}.", cause=cause, remedy=SPACE_REMEDY
                ) from error

    def abandoned(self) -> list[Path]:
        """Return the staging folders whose process has ended."""
        return [
            f
            for f in self.path("build").glob("*-*")
            if _STAGED_NAME.fullmatch(f.name) and remove_unlocked(f, dry_run=True)
        ]

    def remove_abandoned(self) -> list[Path]:
        """Remove the staging folders whose process has ended; return the removed ones."""
        return [folder for folder in self.abandoned() if remove_unlocked(folder)]

    def entries(self) -> list[Entry]:
        """Return the entries, the least recently used first."""
        found = []
        for path in (p for kind in _KINDS for p in self.root.glob(kind)):
            # An archive's description (.json), the archive and its parts, if it has any, are one entry.
            paths = (
                (path, *(path.with_suffix(s) for s in (".tar.gz", ".parts")))
                if path.suffix == ".json"
                else (path,)
            )
            found.append(Entry(paths, path.stat().st_mtime, sum(tree_size(p) for p in paths)))
        return sorted(found, key=lambda entry: entry.used)

    def evict(self, keep: set[Path], limit: int = _LIMIT_BYTES) -> None:
        """Remove the entries that were used longest ago until ``limit`` bytes remain; keep entries with a path in ``keep``."""
        marker = self.root / ".evicted"
        with contextlib.suppress(OSError):
            if (
                time.time() - marker.stat().st_mtime < 3600
            ):  # measuring tens of GB takes seconds: once an hour is enough
                return
        known = self.entries()
        total = sum(entry.size for entry in known)
        for entry in known:
            if total <= limit:
                break
            if not keep.intersection(entry.paths):
                entry.remove()
                total -= entry.size
        marker.touch()


def touch(path: Path) -> None:
    """Mark an entry as used now, so that it is evicted later than others."""
    with contextlib.suppress(OSError):
        os.utime(path)
