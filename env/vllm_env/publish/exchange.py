"""Staging folders beside what they will replace, and the one call that exchanges two folders."""

import contextlib
import ctypes
import errno
import os
from pathlib import Path

from vllm_env.base.locks import locked_folder, remove_unlocked

STAGING = ".vllm_env.staging-"
"""Followed by random letters and digits."""
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


def exchange(one: Path, other: Path) -> bool:
    """Exchange two folders by renameat2(2); False if this file system cannot, OSError if it may not move them."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EXDEV, errno.EBUSY):
        return False
    raise OSError(code, os.strerror(code), str(other))


def staging_in(place: Path) -> contextlib.AbstractContextManager[Path]:
    """Yield a new staging folder, locked (flock) while it is used and removed afterwards."""
    return locked_folder(place, STAGING)


def remove_abandoned_staging(repository: Path) -> list[Path]:
    """Remove the staging folders of dead builds beside and inside the repository; return what was removed."""
    candidates = [*repository.absolute().parent.glob(f"{STAGING}*"), *repository.glob(f"*/{STAGING}*")]
    return [folder for folder in candidates if remove_unlocked(folder)]
