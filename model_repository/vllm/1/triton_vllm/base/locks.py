"""Lock files and folders with flock.

The kernel frees the locks of a process that dies, so nothing depends on an orderly end. A forked
process holds its parent's locks, too, until it ends or ``free`` is called.
"""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def take(path: Path, *, shared: bool = False, waits: bool = False) -> int:
    """Return the descriptor that holds the lock of a file; make the file if it is missing.

    Args:
        path: the file. The process that holds the lock may remove it.
        shared: whether other shared holders are allowed at the same time.
        waits: whether to wait for other holders.

    Raises:
        BlockingIOError: another descriptor holds the lock, of this process or another one.
        OSError: the file cannot be made.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    if not waits:
        kind |= fcntl.LOCK_NB
    # Without O_NOFOLLOW, a link could make us create a file anywhere.
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        descriptor = os.open(path, flags | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, kind)
            # A file without links has just been removed by the previous holder. A lock on it is
            # worthless: the next process makes a new file.
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def take_folder(folder: Path) -> int:
    """Return the descriptor that holds the lock of a folder, so that it is not cleaned up.

    Programs that clean up /tmp, such as systemd-tmpfiles, keep a locked folder.

    Raises:
        BlockingIOError: another descriptor holds the lock.
        OSError: there is no such folder.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def free(descriptor: int) -> None:
    """Free a lock, for children that inherited it as well."""
    # Closing is not enough: EngineCore may have been forked meanwhile, and have the descriptor.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
