"""Find the leftovers of dead servers: environments in ``/tmp`` or unpacked from parts, shared memory, temporary folders.

Triton removes these only on a clean exit. A file that a running process has mapped is kept. So is everything younger than
the oldest running tritonserver, which may be about to use it.

Served models make private copies of vLLM's caches (triton_vllm/startup/warm_cache.py). These outlive their server on
purpose: another running server may read a file there at any time.
"""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from vllm_env.base.filesystem import tree_size
from vllm_env.inside import parts_places

_PLACES = (  # names hard-coded in Triton's pb_env.cc and shm_manager, names from server.py, and names of multiprocessing
    (Path("/tmp"), re.compile(r"python_env_\w{6}|vllm_env_server_\w+|vllm_env_frontends_\w+")),  # noqa: S108
    (
        Path("/dev/shm"),  # noqa: S108
        re.compile(
            r"triton_python_backend_shm_region_.*|vllm_env_[0-9a-f]{12}_.*|sem\.mp-[a-z0-9_]{8}"
        ),
    ),
)
# The user's private caches in the folder for temporary files; the digits are the user's number. In a cache it is warm/.
_WARM = re.compile(r"vllm_env_warm_\d+")


@dataclass(frozen=True)
class Abandoned:
    """A file or folder that no running process uses; ``size`` in bytes."""

    path: Path
    size: int

    def remove(self) -> None:
        """Delete it."""
        shutil.rmtree(self.path, ignore_errors=True) if self.path.is_dir() else self.path.unlink(
            missing_ok=True
        )


def find_abandoned(places: tuple[tuple[Path, re.Pattern[str]], ...] = _PLACES) -> list[Abandoned]:
    """Return the leftovers of dead servers: this user's, or for root those of all users."""
    used, oldest = _used(), _oldest_server()
    found = []
    for folder, pattern in places:
        for path in sorted(folder.iterdir()) if folder.is_dir() else []:
            if not pattern.fullmatch(path.name) or not os.access(folder, os.W_OK):
                continue
            stat = _status(path)
            if stat is None:
                continue
            # /proc/PID/maps names a mapped file by device and inode, too; see _used().
            number = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x} {stat.st_ino}"
            in_use = any(use in (str(path), number) or use.startswith(f"{path}/") for use in used)
            if not in_use and stat.st_mtime < oldest:
                found.append(Abandoned(path, tree_size(path)))
    return found


def find_private_caches(roots: set[Path]) -> list[Abandoned]:
    """Return the private copies of vLLM's caches: this user's, or for root those of all users.

    They are in cache folders (``roots``) and in the folders for temporary files. While a server runs, they are in use.
    """
    found = [path for root in sorted(roots) for path in sorted((root / "warm").glob("*"))]
    for folder in sorted({Path(tempfile.gettempdir()), Path("/tmp")}):  # noqa: S108 - a server may have another TMPDIR
        found += [
            path
            for path in sorted(folder.glob("*"))
            if _WARM.fullmatch(path.name) and _status(path)
        ]
    return [Abandoned(path, tree_size(path)) for path in found]


def server_runs() -> bool:
    """Return whether a tritonserver of this user is running, or for root one of any user."""
    return any(os.getuid() in (0, owner) for owner, _ in _servers())


def _status(path: Path) -> os.stat_result | None:
    """Return the status of a path; None if it belongs to another user, or if another process has just removed it."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found if os.getuid() in (0, found.st_uid) else None


def _used() -> set[str]:  # reads /proc itself: psutil's maps would take seconds
    """Return the paths that processes have mapped, opened or as working folder; mapped files also as device and inode.

    The path is not enough: glibc creates a semaphore's file under another name and links it to its own name later.
    """
    used: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            maps = (
                line.split(None, 5)
                for line in (process / "maps").read_text(errors="replace").splitlines()
                if "/" in line
            )
            used.update(
                name for *_, device, inode, path in maps for name in (path, f"{device} {inode}")
            )
            used.update(
                os.readlink(link)  # noqa: PTH115
                for link in ((process / "cwd"), *(process / "fd").iterdir())
            )
        except OSError:  # the process ended, or belongs to another user
            continue
    return used


def _oldest_server() -> float:
    """Return the start time of the oldest running tritonserver, s since 1970; infinity if none runs."""
    return min((began for _, began in _servers()), default=float("inf"))


def _servers() -> list[tuple[int, float]]:
    """Return the user number and the start time (s since 1970) of each running tritonserver."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # the process has just ended
            if "tritonserver" in process.name() and process.status() != psutil.STATUS_ZOMBIE:
                found.append((process.uids().real, process.create_time()))
    return found


def find_unpacked() -> list[tuple[Path, int, Callable[[], object]]]:
    """Return the unpacked parts that no process uses: each folder, its size in bytes, and the function that removes it.

    The function keeps a folder that a server has begun to use meanwhile.
    """
    found: list[tuple[Path, int, Callable[[], object]]] = []
    for place in parts_places.places():
        free = partial(parts_places.remove_unused, place, 0)
        found += [(Path(path), tree_size(Path(path)), free) for path in free(dry_run=True)]
    return found
