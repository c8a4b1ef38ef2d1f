"""The cache folder: the results of the stages, by content key, with a limit on its size.

An entry is renamed into place, so it is either complete or absent. These are the entries:

    locks/KEY/            locks of specs that have no lock file next to them
    conda/                packages and the local channel
    wheels/, sources/     pinned wheels and the sources that they are built from
    prefixes/KEY/         conda prefixes with their wheels
    bytecode/KEY/         the compiled sources of a wheel or of the interpreter
    archives/KEY.tar.gz   packed prefixes
    stubs/KEY/            stubs built from source
    standins/KEY/         models for the smoke run
    verified/KEY          environments that passed on this machine
    proofs/KEY            the last smoke run of a model's folder
    warm/KEY/             served models' private copies of vLLM's caches
    build/                staging folders of running builds; only SIGKILL leaves one behind
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from .errors import SPACE_REMEDY, VllmEnvError
from .filesystem import give_tree, is_writable, owner_of, remove_tree, tree_size
from .locks import locked_folder, remove_unlocked

# A prefix for CUDA alone has more than 8 GB.
_LIMIT_BYTES = 40 * 2**30
# The entries that may be evicted. Locks and conda packages are not counted, and stay.
_KINDS = (
    "prefixes/*",
    "bytecode/*",
    "archives/*.json",
    "stubs/*",
    "standins/*",
    "wheels/*",
    "sources/*",
    "verified/*",
    "proofs/*",
    "warm/*",
)
# The files that a plan reads. A dry run sees them as links.
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
    """Return the cache folder: ``VLLM_ENV_CACHE`` if it is set, else the default one.

    Raises:
        VllmEnvError: the folder cannot be written, and ``only_read`` is false.
    """
    own = os.environ.get("VLLM_ENV_CACHE")
    root = Path(own).absolute() if own else default_root()
    # Checked here: otherwise the user would see the raw error of whichever file is written first.
    if not only_read and not is_writable(root):
        raise VllmEnvError(
            f"The cache folder {root} cannot be written by user {os.geteuid()}.",
            remedy="Name a folder that can be written: VLLM_ENV_CACHE=DIR.",
        )
    return root


def default_root() -> Path:
    """Return ``vllm_env`` below ``XDG_CACHE_HOME`` or ``~/.cache``.

    Served models always use it, because they do not know ``VLLM_ENV_CACHE``.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "vllm_env"


def settle_home(caches: Path, variables: Mapping[str, str]) -> None:
    """Move all caches, including uv's and pip's, if ``~/.cache`` cannot be written.

    This sets environment variables of this process.

    Args:
        caches: the new place, unless ``VLLM_ENV_CACHE`` names one.
        variables: further variables to set if the caches move, unless the user has set them.
    """
    place = Path(os.environ.get("VLLM_ENV_CACHE") or caches).absolute()
    # A user whom the container's /etc/passwd does not list has the home "/", or none at all.
    try:
        Path.home()
    except RuntimeError:
        os.environ["HOME"] = "/"
    # uv and pip follow XDG_CACHE_HOME, so one variable moves all caches.
    if not is_writable(default_root()) and is_writable(place):
        os.environ["XDG_CACHE_HOME"] = str(place)
        for name, value in variables.items():
            os.environ[name] = os.environ.get(name) or value


def give_cache() -> None:
    """Give files that root wrote into a user's cache to that user."""
    # The user's own builds could not take the locks of files that belong to root.
    if os.geteuid() != 0:
        return
    # Another container's build may remove its staging folder meanwhile.
    with contextlib.suppress(VllmEnvError, OSError):
        root = cache_root()
        owner = owner_of(root)
        # Root may have made the cache folder itself, in a user's folder.
        if owner.uid == 0:
            owner = owner_of(root.parent)
        if owner.uid != 0 and root.is_dir():
            give_tree(root, owner)


@dataclass(frozen=True)
class Entry:
    """One entry of the cache.

    Attributes:
        paths: its files and folders.
        used: time of its last use, s since 1970.
        size: bytes.
    """

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
        """Return a cache in ``folder`` with links to those files of this one that a plan reads."""
        # Only files are linked: a new file in a folder of the new cache must not reach this one.
        for pattern in _PLANNED_WITH:
            for file in self.root.glob(pattern):
                link = folder / file.relative_to(self.root)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(file)
        return Cache(folder)

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """Yield a new folder below ``build/``; lock it while the block runs, then remove it.

        Raises:
            VllmEnvError: the file system is full.
        """
        build = self.path("build")
        build.mkdir(parents=True, exist_ok=True)
        with locked_folder(build, _STAGED) as folder:
            try:
                yield folder
            except OSError as error:
                # Stages check the space before they start, but another program may fill the disk.
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                raise VllmEnvError(
                    f"No space left in {self.root}.",
                    cause=f"{error.strerror}: {error.filename or folder}.",
                    remedy=SPACE_REMEDY,
                ) from error

    def abandoned(self) -> list[Path]:
        """Return the staging folders whose process has ended."""
        # VLLM_ENV_CACHE may name a folder in which the user keeps a ``build/`` of their own.
        folders = [f for f in self.path("build").glob("*-*") if _STAGED_NAME.fullmatch(f.name)]
        return [folder for folder in folders if remove_unlocked(folder, dry_run=True)]

    def remove_abandoned(self) -> list[Path]:
        """Remove the staging folders whose process has ended; return the removed ones."""
        return [folder for folder in self.abandoned() if remove_unlocked(folder)]

    def entries(self) -> list[Entry]:
        """Return the entries, the least recently used first."""
        entries = []
        for kind in _KINDS:
            for path in self.root.glob(kind):
                paths = [path]
                # An archive's description, the archive and its parts, if any, are one entry.
                if path.suffix == ".json":
                    paths += [path.with_suffix(".tar.gz"), path.with_suffix(".parts")]
                size = sum(map(tree_size, paths))
                entries.append(Entry(tuple(paths), path.stat().st_mtime, size))
        return sorted(entries, key=attrgetter("used"))

    def evict(self, keep: set[Path], limit: int = _LIMIT_BYTES) -> None:
        """Remove the least recently used entries until ``limit`` bytes remain.

        This does nothing if it was done in the last hour. Entries with a path in ``keep`` stay,
        however full the cache is.
        """
        marker = self.root / ".evicted"
        with contextlib.suppress(OSError):
            # The file's time is the last call's. To measure tens of GB takes seconds.
            if time.time() - marker.stat().st_mtime < 3600:
                return
        entries = self.entries()
        total = sum(entry.size for entry in entries)
        for entry in entries:
            if total <= limit:
                break
            if not keep.intersection(entry.paths):
                entry.remove()
                total -= entry.size
        marker.touch()


def touch(path: Path) -> None:
    """Mark an entry as used now, so that it is evicted later than others."""
    # A failure has no consequence but an earlier eviction.
    with contextlib.suppress(OSError):
        os.utime(path)
