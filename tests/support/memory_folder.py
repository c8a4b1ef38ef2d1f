"""Keeps the temporary folders of tests in memory: tests write many small files, and half of the time went to the disk."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil

SHARED = Path("/dev/shm")
_PREFIX = "pytest_vllm_env_"  # and the process id of its run
_FREE = 6 << 30  # bytes: three times an unpacked environment
_AVAILABLE = 16 << 30  # bytes: engines of tests take up to 9 GB


def make_memory_folder() -> Path | None:
    """Return a new folder in ``/dev/shm``, or None where it has no room for tests or runs no programs, as in many containers."""
    if not os.access(SHARED, os.W_OK) or os.statvfs(SHARED).f_flag & os.ST_NOEXEC:
        return None
    _remove_those_of_killed_runs()
    if shutil.disk_usage(SHARED).free < _FREE or psutil.virtual_memory().available < _AVAILABLE:
        return None
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}_", dir=SHARED))


def _remove_those_of_killed_runs() -> None:
    for folder in SHARED.glob(f"{_PREFIX}*"):
        with suppress(ValueError, OSError):  # another's, or just gone
            process = int(folder.name.removeprefix(_PREFIX).partition("_")[0])
            if folder.stat().st_uid == os.geteuid() and not psutil.pid_exists(process):
                shutil.rmtree(folder)
