"""What dead servers left behind: environments extracted to ``/tmp``, shared memory, their temporary folders.

Triton removes these on a clean exit only. Nothing is touched that a running process has mapped, nor anything younger than
the oldest tritonserver that runs: that may be about to use it.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

_PLACES = (  # Triton's own names, hard-coded in pb_env.cc and shm_manager; and those that server.py gives
    (Path("/tmp"), re.compile(r"python_env_\w{6}|vllm_env_server_\w+")),  # noqa: S108
    (Path("/dev/shm"), re.compile(r"triton_python_backend_shm_region_.*|vllm_env_[0-9a-f]{12}_.*")),  # noqa: S108
)


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
                found.append(Abandoned(path, _size(path)))
    return found


def _is_ours(path: Path) -> bool:
    return os.getuid() in (0, path.lstat().st_uid)


def _size(path: Path) -> int:
    return sum(f.lstat().st_size for f in path.rglob("*") if not f.is_dir()) if path.is_dir() else path.lstat().st_size


def _used_paths() -> set[str]:
    """Return what running processes have mapped, opened, or as their folder."""
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
    began = [float("inf")]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if "tritonserver" in (process / "comm").read_text():
                began.append(process.stat().st_mtime)
        except OSError:
            continue
    return min(began)
