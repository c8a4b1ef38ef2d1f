"""Locks of files (flock): the kernel frees those of a process that dies, so nothing depends on an orderly end.

A process that was forked holds them, too, until it ends or `free` is called.
"""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def take(path: Path, *, shared: bool = False, waits: bool = False) -> int:
    """Return the descriptor that holds the lock of a file, which is made if it is not there.

    Args:
        path: the file; whoever holds it may remove it.
        shared: whether others may hold it at the same time, who say the same.
        waits: whether to wait for others.

    Raises:
        BlockingIOError: another process holds it.
        OSError: the file cannot be made.
    """
    kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if waits else fcntl.LOCK_NB)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, kind)
            if os.fstat(descriptor).st_nlink:  # else whoever held it has just removed it
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def free(descriptor: int) -> None:
    """Give a lock up, also for children that have it."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
