"""What dead servers left behind: environments extracted to ``/tmp``, shared memory, their temporary folders.

Triton removes these on a clean exit only. Nothing is touched that a running process has mapped, nor anything younger than
the oldest tritonserver that runs: that may be about to use it. The private copies of vLLM's caches that served models make
(triton_vllm/loading/warm_cache.py) outlive their server on purpose, and are freed only while no tritonserver of this user
runs: one reads a file there whenever a shape first comes up, and holds none open.
"""

import contextlib
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from vllm_env.base.filesystem import tree_size

_PLACES = (  # Triton's own names, hard-coded in pb_env.cc and shm_manager; and those that server.py gives
    (Path("/tmp"), re.compile(r"python_env_\w{6}|vllm_env_server_\w+")),  # noqa: S108
    (Path("/dev/shm"), re.compile(r"triton_python_backend_shm_region_.*|vllm_env_[0-9a-f]{12}_.*")),  # noqa: S108
)
_WARM = re.compile(r"vllm_env_warm_\d+")  # of a user by number, below the folder for temporary files; a cache has warm/


@dataclass(frozen=True)
class Abandoned:
    """A file or folder that no running process uses; ``size`` in bytes."""

    path: Path
    size: int

    def remove(self) -> None:
        """Free it."""
        shutil.rmtree(self.path, ignore_errors=True) if self.path.is_dir() else self.path.unlink(missing_ok=True)


def find_abandoned(places: tuple[tuple[Path, re.Pattern[str]], ...] = _PLACES) -> list[Abandoned]:
    """Return what dead servers left, of this user or, for root, of all."""
    used = _used_paths()
    oldest = _oldest_server()
    found = []
    for folder, pattern in places:
        for path in sorted(folder.iterdir()) if folder.is_dir() else []:
            if not pattern.fullmatch(path.name) or not os.access(folder, os.W_OK) or not _is_ours(path):
                continue
            in_use = any(use == str(path) or use.startswith(f"{path}/") for use in used)
            if not in_use and path.lstat().st_mtime < oldest:
                found.append(Abandoned(path, tree_size(path)))
    return found


def find_private_caches(roots: set[Path]) -> list[Abandoned]:
    """Return the private copies of vLLM's caches, of this user or, for root, of all; in use while a server runs.

    They are in cache folders (``roots``) and in the folders for temporary files.
    """
    found = [path for root in sorted(roots) for path in sorted((root / "warm").glob("*"))]
    for folder in sorted({Path(tempfile.gettempdir()), Path("/tmp")}):  # noqa: S108 - a server need not have our TMPDIR
        found += [path for path in sorted(folder.glob("*")) if _WARM.fullmatch(path.name) and _is_ours(path)]
    return [Abandoned(path, tree_size(path)) for path in found]


def server_runs() -> bool:
    """Tell whether a tritonserver of this user or, for root, of anybody runs."""
    return any(os.getuid() in (0, owner) for owner, _ in _servers())


def _is_ours(path: Path) -> bool:
    return os.getuid() in (0, path.lstat().st_uid)


def _used_paths() -> set[str]:
    """Return what running processes have mapped, opened, or as their folder; psutil's maps would take seconds."""
    used: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            maps = (process / "maps").read_text(errors="replace")
            used.update(line.split(None, 5)[5] for line in maps.splitlines() if "/" in line)
            used.update(os.readlink(link) for link in ((process / "cwd"), *(process / "fd").iterdir()))  # noqa: PTH115
        except OSError:  # it ended, or is another user's
            continue
    return used


def _oldest_server() -> float:
    """Return when the oldest running tritonserver began, s since 1970, or infinity if none runs."""
    return min((began for _, began in _servers()), default=float("inf"))


def _servers() -> list[tuple[int, float]]:
    """Return the user's number and the start, s since 1970, of each running tritonserver."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has just ended
            if "tritonserver" in process.name() and process.status() != psutil.STATUS_ZOMBIE:
                found.append((process.uids().real, process.create_time()))
    return found
