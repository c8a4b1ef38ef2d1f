"""Staging folders beside what they will replace, and the one call that exchanges two folders."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from . import cache

if TYPE_CHECKING:
    from collections.abc import Iterator

STAGING = ".vllm_env.staging-"
"""Followed by random letters and digits; once it was the id of the process that stages there."""
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


def exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one step, renameat2(2); False if this file system cannot.

    Raises:
        OSError: it could, but the folders may not be moved.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EXDEV, errno.EBUSY):
        return False
    raise OSError(code, os.strerror(code), str(other))


@contextlib.contextmanager
def staging_in(place: Path) -> Iterator[Path]:
    """Give a new staging folder, locked (flock) as long as it is used, and remove it afterwards.

    The lock tells a living owner from a dead one. The id of its process would not: two containers that share a repository
    do not see each other's processes, and the builder is often process 1 in both.
    """
    with contextlib.ExitStack() as stack:
        folder = place
        while folder == place or not folder.exists():  # until it is locked, another build may take it for abandoned
            folder = Path(tempfile.mkdtemp(prefix=STAGING, dir=place))
            stack.callback(cache.remove_tree, folder)
            with contextlib.suppress(FileNotFoundError):
                stack.callback(os.close, _lock(folder, fcntl.LOCK_EX))
        yield folder


def _lock(folder: Path, operation: int) -> int:
    """Lock a folder and return the handle that holds it.

    Raises:
        OSError: it is gone, may not be read, or is locked and ``operation`` has LOCK_NB.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, operation)
    except BaseException:
        os.close(handle)
        raise
    return handle


def remove_abandoned_staging(repository: Path) -> list[Path]:
    """Remove the staging folders of dead builds beside and inside the repository; return what was removed.

    A folder that is locked stays; so does one of an older version, which locks nothing, while its process is seen to run.
    """
    candidates = [*repository.absolute().parent.glob(f"{STAGING}*"), *repository.glob(f"*/{STAGING}*")]
    removed = []
    for folder in candidates:
        owner = folder.name[len(STAGING) :]
        if owner.isdigit() and int(owner) != os.getpid() and Path(f"/proc/{owner}").exists():
            continue
        with contextlib.suppress(OSError):
            handle = _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                cache.remove_tree(folder)
            finally:
                os.close(handle)
            removed += [] if folder.exists() else [folder]
    return removed
