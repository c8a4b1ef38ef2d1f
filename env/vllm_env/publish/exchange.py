"""Staging folders next to the folders that they replace, and the exchange of two folders."""

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterable
from pathlib import Path

from vllm_env.base.errors import VllmEnvError
from vllm_env.base.filesystem import mounts_in
from vllm_env.base.locks import locked_folder, remove_unlocked
from vllm_env.base.workspace import Workspace

STAGING_PREFIX = ".vllm_env.staging-"
"""The start of a staging folder's name; random letters and digits follow."""

# RENAME_EXCHANGE and AT_FDCWD of Linux; Python's os module does not offer renameat2.
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


def exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one step by renameat2(2); return False if that is not possible here.

    Raises:
        OSError: the folders may not be moved.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.renameat2(
        _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE
    )
    if not failed:
        return True
    code = ctypes.get_errno()
    # EXDEV: two file systems. EBUSY: a mount point. The others: the kernel or the file system
    # does not support the exchange.
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EXDEV, errno.EBUSY):
        return False
    raise OSError(code, os.strerror(code), str(other))


def refuse_mounts(folder: Path, names: Iterable[str]) -> None:
    """Raise a VllmEnvError if a volume is mounted at or below one of the ``names``."""
    # Replacing such a file or folder would empty the user's volume.
    for name in names:
        for point in mounts_in(folder / name):
            raise VllmEnvError(
                f"{folder} cannot be filled again: {point} is a mount point.",
                cause="A build replaces what is there, and would delete the volume's files.",
                remedy=(
                    f"Take the mount away (umount {point}, or omit its -v or --mount), "
                    "or take another folder."
                ),
            )


def publishing(workspace: Workspace, repository: Path) -> contextlib.AbstractContextManager[None]:
    """Hold the publishing lock of a repository, which builds in other containers may share."""
    waiting = f"another build publishes in {repository}; waiting for it to end"
    return workspace.locked(repository, waiting)


def staging_in(place: Path) -> contextlib.AbstractContextManager[Path]:
    """Yield a new staging folder. It is locked while the block runs, and removed afterwards."""
    return locked_folder(place, STAGING_PREFIX)


def remove_abandoned_staging(repository: Path) -> list[Path]:
    """Remove the staging folders of dead builds next to and inside the repository; return them."""
    # A living build holds the lock of its staging folder, also in another container.
    candidates = [
        *repository.absolute().parent.glob(f"{STAGING_PREFIX}*"),
        *repository.glob(f"*/{STAGING_PREFIX}*"),
    ]
    return [folder for folder in candidates if remove_unlocked(folder)]
