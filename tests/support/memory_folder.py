"""Keeps the temporary folders of tests in memory: they write many small files, which costs much time on a disk."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from vllm_env.base.locks import locked_folder, remove_unlocked

if TYPE_CHECKING:
    from collections.abc import Iterator

SHARED = Path("/dev/shm")
CGROUP = Path("/sys/fs/cgroup")
_PREFIX = "pytest_vllm_env_"
_FREE = 4 << 30  # bytes in /dev/shm
_AVAILABLE = 16 << 30  # bytes of memory: engines of tests take up to 10 GB


@contextmanager
def memory_folder() -> Iterator[Path | None]:
    """Yield a new folder in ``/dev/shm``, or None where it has no room for tests or runs no programs, as in many containers.

    At first, the folders of killed runs are removed. At the end, the new one is.
    """
    if not os.access(SHARED, os.W_OK) or os.statvfs(SHARED).f_flag & os.ST_NOEXEC:
        yield None
        return
    for folder in SHARED.glob(f"{_PREFIX}*"):
        if folder.stat().st_uid == os.geteuid():
            remove_unlocked(folder)
    if shutil.disk_usage(SHARED).free < _FREE or available_memory() < _AVAILABLE:
        yield None
        return
    with locked_folder(SHARED, _PREFIX) as folder:
        yield folder


def available_memory() -> int:
    """Return the bytes that are free: of the machine, or of what a container may take if that is less."""
    machine = int(psutil.virtual_memory().available)
    with suppress(OSError, ValueError):  # no container, or "max"
        limit, taken = (int((CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        return min(machine, limit - taken)
    return machine
