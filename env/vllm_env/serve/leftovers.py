"""Find the leftovers of dead servers: extracted environments, shared memory, temporary folders.

Triton removes these only on a clean exit. A file that a running process has mapped is kept. So is
everything younger than the oldest running tritonserver, which may be about to use it.

Served models make private copies of vLLM's caches (triton_vllm/startup/warm_cache.py). These
outlive their server on purpose: another running server may read a file there at any time.
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

# python_env_* is hard-coded in Triton's pb_env.cc, triton_python_backend_shm_region_* is in its
# shm_manager, and sem.mp-* is the name that Python's multiprocessing gives. The vllm_env_* names
# are those of server.py and of the model's front ends.
_PLACES = (
    (Path("/tmp"), re.compile(r"python_env_\w{6}|\.?vllm_env_(server|frontends|links|run)_\w+")),  # noqa: S108
    (
        Path("/dev/shm"),  # noqa: S108
        re.compile(
            r"triton_python_backend_shm_region_.*|vllm_env_[0-9a-f]{12}_.*|sem\.mp-[a-z0-9_]{8}"
        ),
    ),
)
# A user's private caches in the folder for temporary files; the digits are the user's number.
# In a cache, their folder is called warm.
_WARM = re.compile(r"vllm_env_warm_\d+")


@dataclass(frozen=True)
class Abandoned:
    """A file or folder that no running process uses; ``size`` in bytes."""

    path: Path
    size: int

    def remove(self) -> None:
        """Delete it."""
        delete(self.path)


def delete(path: Path) -> None:
    """Delete a file, or a folder with its contents; do nothing if it does not exist."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def find_abandoned(places: tuple[tuple[Path, re.Pattern[str]], ...] = _PLACES) -> list[Abandoned]:
    """Return the leftovers of dead servers: this user's, or for root those of all users.

    Args:
        places: folders, and the pattern of a leftover's name in each.
    """
    used = _used()
    oldest = _oldest_server()
    abandoned = []
    for folder, pattern in places:
        # This user cannot remove a file from a folder that is not writable.
        if not os.access(folder, os.W_OK):
            continue
        for path in sorted(folder.iterdir()):
            status = _status(path) if pattern.fullmatch(path.name) else None
            if status is None:
                continue
            # /proc/PID/maps names a mapped file by device and inode, too; see _used().
            device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
            names = {str(path), f"{device} {status.st_ino}"}
            # The file itself, or a file in the folder.
            is_used = names & used or any(name.startswith(f"{path}/") for name in used)
            # A younger one may soon be used.
            if not is_used and status.st_mtime < oldest:
                abandoned.append(Abandoned(path, tree_size(path)))
    return abandoned


def find_private_caches(roots: set[Path]) -> list[Abandoned]:
    """Return the private copies of vLLM's caches: this user's, or for root those of all users.

    They are in cache folders (``roots``) and in the folders for temporary files. While a server
    runs, they are in use.
    """
    copies = [path for root in roots for path in (root / "warm").glob("*")]
    # A server may have another TMPDIR than this process.
    for folder in {Path(tempfile.gettempdir()), Path("/tmp")}:  # noqa: S108
        caches = (path for path in folder.glob("*") if _WARM.fullmatch(path.name))
        copies += [path for path in caches if _status(path)]
    return [Abandoned(path, tree_size(path)) for path in sorted(copies)]


def server_runs() -> bool:
    """Return whether a tritonserver of this user is running, or for root one of any user."""
    return any(os.getuid() in (0, owner) for owner, _ in _servers())


def _status(path: Path) -> os.stat_result | None:
    """Return the status of a path, or None if this user may not remove it."""
    # Another process may just have removed it: servers clean up at the same time.
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        # In /tmp, the sticky bit lets only the owner and root remove a file.
        if os.getuid() in (0, status.st_uid):
            return status
    return None


def _used() -> set[str]:
    """Return the paths that processes have mapped or opened, or that are their working folder.

    A mapped file also appears as "DEVICE INODE", as in ``/proc/PID/maps``.
    """
    # The path is not enough: glibc creates a semaphore's file under another name and links it to
    # its own name later. This reads /proc itself, because psutil's maps would take seconds.
    used: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        # The process may have ended, or belong to another user.
        with contextlib.suppress(OSError):
            for line in (process / "maps").read_text(errors="replace").splitlines():
                # A line without a path is anonymous memory.
                if "/" in line:
                    *_, device, inode, path = line.split(None, 5)
                    used |= {path, f"{device} {inode}"}
            for link in (process / "cwd", *(process / "fd").iterdir()):
                used.add(os.readlink(link))  # noqa: PTH115
    return used


def _oldest_server() -> float:
    """Return the start of the oldest running tritonserver, s since 1970; infinity if none runs."""
    return min((began for _, began in _servers()), default=float("inf"))


def _servers() -> list[tuple[int, float]]:
    """Return the user number and the start (s since 1970) of each running tritonserver."""
    servers = []
    for process in psutil.process_iter():
        # The process may have just ended. A zombie keeps its name but uses no file.
        with contextlib.suppress(psutil.Error):
            if "tritonserver" in process.name() and process.status() != psutil.STATUS_ZOMBIE:
                servers.append((process.uids().real, process.create_time()))
    return servers


def find_unpacked() -> list[tuple[Path, int, Callable[[], object]]]:
    """Return the unpacked parts that no process uses.

    Returns:
        Each folder, its size in bytes, and the function that removes it. The function keeps a
        folder that a server has begun to use meanwhile.
    """
    unpacked: list[tuple[Path, int, Callable[[], object]]] = []
    for place in parts_places.places():
        free = partial(parts_places.remove_unused, place, keep=0)
        unpacked += [(Path(path), tree_size(Path(path)), free) for path in free(dry_run=True)]
    return unpacked
