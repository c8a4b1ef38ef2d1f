"""A private folder for vLLM's sockets, and for the names of the shared memory that a load uses.

vLLM never removes its sockets. The names of shared memory stay if all processes are killed at once.
So each start removes what starts before it have left, unless a process still uses it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from triton_vllm.base import locks
from triton_vllm.base.processes import process_space

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

VARIABLE = "VLLM_RPC_BASE_PATH"
"""The variable of vLLM that names the folder for its sockets."""
LONGEST_FOLDER = 107 - len("/") - 36
"""The most bytes of the folder's path: a Unix socket's path has 107, and vLLM's names have 36."""
_NAME = "vllm_env_run_"
_MEMORY = Path("/dev/shm")  # noqa: S108 - where Linux has POSIX shared memory


class RunFolder:
    """The folder of one process; it exists as long as the process, and is locked meanwhile.

    Args:
        home: the folder for temporary files.

    Attributes:
        path: the folder.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, home: Path) -> None:
        # Renamed after it is locked, so that no other start removes it in between.
        staged = Path(tempfile.mkdtemp(prefix=f".{_NAME}", dir=home))
        self._lock = locks.take(staged / "lock")
        self.path = staged.rename(home / staged.name.removeprefix("."))

    @property
    def fits(self) -> bool:
        """Whether sockets in it have paths that are short enough."""
        return len(os.fsencode(self.path)) <= LONGEST_FOLDER

    def note_memory(self) -> None:
        """Write down the shared memory that this process and its children use."""
        names = _used([os.getpid(), *_children()])
        text = json.dumps({"space": process_space(), "names": sorted(names)})
        (self.path / "memory").write_text(text, encoding="utf-8")

    def remove(self) -> None:
        """Remove the folder, because this process ends."""
        shutil.rmtree(self.path, ignore_errors=True)
        locks.free(self._lock)


def sweep(home: Path) -> None:
    """Remove the folders of processes that were killed, and the shared memory that they have left.

    Args:
        home: the folder for temporary files.
    """
    for folder in home.glob(f"{_NAME}*"):
        # It is in use, or has just been removed.
        with contextlib.suppress(OSError):
            # Another user could have put anything into it.
            if folder.lstat().st_uid != os.getuid() or folder.is_symlink():
                continue
            lock = locks.take(folder / "lock")
            try:
                _remove_memory(folder / "memory")
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                locks.free(lock)


def _remove_memory(file: Path) -> None:
    # Without a file, the process was killed during its load. If it was written half, nothing is
    # known either.
    try:
        noted = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    # The processes of another container that shares the memory cannot be seen from here.
    if noted["space"] != process_space():
        return
    for name in set(noted["names"]) - _used(psutil.pids()):
        with contextlib.suppress(OSError):
            (_MEMORY / name).unlink()


def _children() -> Iterator[int]:
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process().children(recursive=True):
            yield child.pid


def _used(processes: Iterable[int]) -> set[str]:
    """Return the names of the shared memory that processes have in their address space."""
    found = set()
    for process in processes:
        # It may have ended, or belong to another user.
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process}/maps").read_text(encoding="utf-8").splitlines():
                # proc_pid_maps(5): address, permissions, offset, device, inode, path
                path = Path(line.split(maxsplit=5)[-1])
                if path.parent == _MEMORY and not path.name.endswith(" (deleted)"):
                    found.add(path.name)
    return found
