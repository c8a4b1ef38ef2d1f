"""Detect changes in a model's folder while its replacement is being made.

The exchange would delete files that a user adds or edits meanwhile. Making the replacement takes a moment; on a slow disk
it takes minutes.
"""

import contextlib
import os
import stat
from collections.abc import Collection
from pathlib import Path

from vllm_env.base.errors import VllmEnvError

from .exchange import STAGING

State = dict[Path, tuple[int, ...]]


def state_of(model: Path, left_out: Collection[str]) -> State:
    """Return the size (bytes) and mtime (ns) of a model's files, and its folders, without staging and ``left_out``.

    Inodes are not compared. On an overlay, a file's inode may change when the file gets a hard link (overlayfs without xino,
    kernel documentation).
    """
    found: State = {}
    for folder, names, files in os.walk(model):
        if folder == str(model):
            names[:] = [
                name for name in names if name not in left_out and not name.startswith(STAGING)
            ]
            files = [name for name in files if name not in left_out]  # noqa: PLW2901
        for path in (Path(folder, name) for name in (*names, *files)):
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                # Only a folder's existence counts: its time changes with each of its entries, which are compared themselves.
                found[path] = (
                    () if stat.S_ISDIR(status.st_mode) else (status.st_size, status.st_mtime_ns)
                )
    return found


def refuse_changes(model: Path, new: Path, before: State, left_out: Collection[str]) -> None:
    """Raise a VllmEnvError if a file or folder was added, removed or changed since `state_of` returned ``before``.

    A file that ``new`` shares by a hard link may change: the write is seen in both folders.
    """
    for path in sorted({path for path, _ in before.items() ^ state_of(model, left_out).items()}):
        with contextlib.suppress(FileNotFoundError):
            if path.samefile(new / path.relative_to(model)):
                continue
        what = f"{path} was changed while {model} was being replaced."
        raise VllmEnvError(
            what, cause="The change would be lost; all is as it stands.", remedy="Try again."
        )
