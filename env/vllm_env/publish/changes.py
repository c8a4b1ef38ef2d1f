"""Tells whether someone has worked in a model's folder while the one that will replace it was made.

What is made, removed or replaced in the old folder then would go with it. That takes a moment, and minutes on a slow disk.
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
    """Return size (bytes) and time of change (ns) of the files, and the folders, of a model but what is staged and ``left_out``.

    No inodes: on an overlay a file's may change when it gets a hard link (overlayfs without xino, kernel documentation).
    """
    found: State = {}
    for folder, names, files in os.walk(model):
        if folder == str(model):
            names[:] = [name for name in names if name not in left_out and not name.startswith(STAGING)]
            files = [name for name in files if name not in left_out]  # noqa: PLW2901
        for path in (Path(folder, name) for name in (*names, *files)):
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                found[path] = () if stat.S_ISDIR(status.st_mode) else (status.st_size, status.st_mtime_ns)
    return found


def refuse_changes(model: Path, new: Path, before: State, left_out: Collection[str]) -> None:
    """Refuse, with a VllmEnvError, to replace a folder in which something has come, gone or changed since `state_of` was asked.

    What is written into a file of which ``new`` has a hard link is there, too.
    """
    for path in sorted({path for path, _ in before.items() ^ state_of(model, left_out).items()}):
        with contextlib.suppress(FileNotFoundError):
            if path.samefile(new / path.relative_to(model)):
                continue
        what = f"{path} was changed while {model} was being replaced."
        raise VllmEnvError(what, cause="The change would be lost; all is as it stands.", remedy="Try again.")
