"""Staging folders beside what they will replace, and the one call that exchanges two folders."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_env.base import cache

if TYPE_CHECKING:
    import contextlib

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


def staging_in(place: Path) -> contextlib.AbstractContextManager[Path]:
    """Give a new staging folder, locked (flock) as long as it is used, and remove it afterwards."""
    return cache.locked_folder(place, STAGING)


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
        removed += [folder] if cache.remove_unlocked(folder) else []
    return removed
