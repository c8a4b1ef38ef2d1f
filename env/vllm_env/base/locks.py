"""Advisory locks (flock(2)) on files and folders.

The kernel releases a lock when its process ends, for whatever reason.

filelock is not used: it locks files that it creates. We lock folders, namely the user's model
repository and staging folders. A killed build would leave one lock file per staging folder.
"""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from .filesystem import remove_tree
from .interrupts import interrupts_held

# O_NOFOLLOW: a build never makes a link here, so a link is not what it seems to be.
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


@contextlib.contextmanager
def locked(place: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a folder, or of a file, which is created if it is missing.

    Call ``waiting`` if another process holds the lock.
    """
    flags = os.O_RDONLY if place.is_dir() else os.O_RDWR | os.O_CREAT
    try:
        handle = take_lock(place, fcntl.LOCK_EX | fcntl.LOCK_NB, flags)
    except BlockingIOError:
        waiting()
        handle = take_lock(place, fcntl.LOCK_EX, flags)
    try:
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def locked_folder(place: Path, prefix: str) -> Iterator[Path]:
    """Yield a new folder in ``place``; lock it while the block runs, then remove it.

    The lock shows whether the owner is alive. A process id would not. Two containers that share a
    repository or a cache do not see each other's processes, and the builder is often process 1 in
    both.
    """
    with interrupts_held() as let_through, contextlib.ExitStack() as stack:
        # As long as it is ``place``, no folder has been made.
        folder = place
        # Another build may remove the folder as abandoned before it is locked. Then make another.
        while folder == place or not folder.exists():
            folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
            stack.callback(remove_tree, folder)
            with contextlib.suppress(FileNotFoundError):
                stack.callback(os.close, take_lock(folder, fcntl.LOCK_EX))
        with let_through():
            yield folder


def remove_unlocked(folder: Path, *, dry_run: bool = False) -> bool:
    """Remove a folder of ``locked_folder`` whose process has ended; return whether it is gone.

    A dry run returns whether it would be gone.
    """
    try:
        handle = take_lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    # The folder is missing, or its process still holds the lock.
    except OSError:
        return False
    try:
        if not dry_run:
            remove_tree(folder)
    finally:
        os.close(handle)
    return dry_run or not folder.exists()


def take_lock(place: Path, operation: int, flags: int = _FOLDER) -> int:
    """Lock a folder, or the file that ``flags`` open, and return the handle that holds the lock.

    Raises:
        OSError: the path is missing, or another process has the lock and ``operation`` has LOCK_NB.
    """
    # O_CLOEXEC: a program that a build starts must not keep the lock after the build.
    handle = os.open(place, flags | os.O_CLOEXEC, 0o644)
    is_locked = False
    try:
        fcntl.flock(handle, operation)
        is_locked = True
    # Another process has the lock: callers know this error.
    except BlockingIOError:
        raise
    # The error has no path. NFS gives one if its lock service does not run.
    except OSError as error:
        text = f"cannot be locked ({error.strerror}); use a folder on a local disk"
        raise OSError(error.errno, text, str(place)) from error
    finally:
        if not is_locked:
            os.close(handle)
    return handle
