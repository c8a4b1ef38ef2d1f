"""Detect changes in a model's folder while its replacement is being made.

The exchange would delete files that a user adds or edits meanwhile. Making the replacement takes
a moment; on a slow disk it takes minutes.
"""

import contextlib
import os
import stat
from pathlib import Path

from vllm_env.base.errors import VllmEnvError

from .model_folder import is_replaced

State = dict[Path, tuple[int, ...]]
"""The size (bytes) and mtime (ns) of each file; an empty tuple for a folder."""


def state_of(model: Path) -> State:
    """Return the state of a model's files and folders, without built files and staging."""
    # Inodes are not compared. On an overlay, a file's inode may change when the file gets a hard
    # link (overlayfs without xino, kernel documentation).
    state: State = {}
    for folder, names, files in os.walk(model):
        paths = [Path(folder, name) for name in (*names, *files)]
        if folder == str(model):
            # A build replaces these anyway. os.walk() does not enter folders that are taken out
            # of its list.
            names[:] = [name for name in names if not is_replaced(name)]
            paths = [path for path in paths if not is_replaced(path.name)]
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                # Only a folder's existence counts. Its time changes with each of its entries,
                # and these are compared themselves.
                is_folder = stat.S_ISDIR(status.st_mode)
                state[path] = () if is_folder else (status.st_size, status.st_mtime_ns)
    return state


def refuse_changes(model: Path, new: Path, before: State) -> None:
    """Check that no file or folder of ``model`` has changed since ``state_of`` returned ``before``.

    Raises:
        VllmEnvError: a file or folder was added, removed or changed, and ``new`` lacks the change.
    """
    changed = {path for path, _ in before.items() ^ state_of(model).items()}
    for path in sorted(changed):
        # A file that both folders share by a hard link may change: the write is seen in both.
        with contextlib.suppress(FileNotFoundError):
            if path.samefile(new / path.relative_to(model)):
                continue
        raise VllmEnvError(
            f"{path} was changed while {model} was being replaced.",
            cause="The change would be lost. Nothing was replaced.",
            remedy="Try again.",
        )
