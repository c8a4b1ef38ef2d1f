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

from triton_vllm.base import locks
from triton_vllm.base.processes import process_space

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SOCKETS_VARIABLE = "VLLM_RPC_BASE_PATH"
"""The variable of vLLM that names the folder for its sockets."""
LONGEST_FOLDER_BYTES = 107 - len("/") - 36
"""The most bytes of the folder's path: a Unix socket's path has 107, and vLLM's names have 36."""
_FOLDER_PREFIX = "vllm_env_run_"
_NOTE_NAME = "memory"
_OF_PYTHON = ("psm_", "sem.mp-")
"""How the names begin that Python gives to shared memory and semaphores."""
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Linux has POSIX shared memory


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
        # 1) Find the shared memory that is not this load's: all that exists already. But Triton has
        #    made some for this process, and names it in its command line.
        command = Path("/proc/self/cmdline").read_bytes().split(b"\0")
        own = {os.fsdecode(argument) for argument in command}
        self._noted: set[str] = set()
        self._foreign = {path.name for path in _shared_memory_files()} - own
        # 2) Make the folder. It gets its final name after it is locked: `sweep` of another start,
        #    which only knows that name, would otherwise remove it.
        staged = Path(tempfile.mkdtemp(prefix=f".{_FOLDER_PREFIX}", dir=home))
        self._lock = locks.take_folder(staged)
        self.path = staged.rename(home / staged.name.removeprefix("."))
        self.note_memory()

    @property
    def fits(self) -> bool:
        """Whether sockets in it have paths that are short enough."""
        return len(os.fsencode(self.path)) <= LONGEST_FOLDER_BYTES

    def note_memory(self) -> None:
        """Write down the shared memory that this process and its children use or have used."""
        used = _mapped_files([os.getpid(), *_children()])
        self._noted |= {path.name for path in used} - self._foreign
        text = json.dumps({"space": process_space(), "names": sorted(self._noted)})
        # The load goes on without a note. Only a kill then leaves memory that no later start
        # removes.
        with contextlib.suppress(OSError):
            (self.path / _NOTE_NAME).write_text(text, encoding="utf-8")

    def remove(self) -> None:
        """Remove the folder, and the shared memory of killed workers; this process ends."""
        # vLLM kills workers that do not end in 5 s. It also kills Python's resource tracker, which
        # would remove their shared memory.
        _remove_memory(self.path / _NOTE_NAME, _OF_PYTHON)
        shutil.rmtree(self.path, ignore_errors=True)
        locks.free(self._lock)


def sweep(home: Path) -> None:
    """Remove the folders of processes that were killed, and the shared memory that they have left.

    Args:
        home: the folder for temporary files.
    """
    for folder in home.glob(f"{_FOLDER_PREFIX}*"):
        # An error means that the folder is in use, or has just been removed.
        with contextlib.suppress(OSError):
            # Another user could have put anything into it.
            if folder.lstat().st_uid != os.getuid() or folder.is_symlink():
                continue
            # The process that holds this lock still lives.
            lock = locks.take_folder(folder)
            try:
                if _remove_memory(folder / _NOTE_NAME):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                locks.free(lock)


def _remove_memory(note: Path, prefixes: tuple[str, ...] = ("",)) -> bool:
    """Remove the shared memory that a note names and no process uses.

    Args:
        note: the file.
        prefixes: only names that begin so are removed. Other containers may use the rest.

    Returns:
        Whether the note's folder may be removed: False if a process uses some of the memory.
    """
    # The process may have been killed before it has written a note, or while it wrote.
    try:
        noted = json.loads(note.read_text(encoding="utf-8"))
        space = noted["space"]
        names = set(noted["names"])
    except (OSError, ValueError, KeyError, TypeError):
        return True
    # The processes of another container that shares the memory cannot be seen from here.
    if space != process_space() or not names:
        return True
    # Imported here because an environment in parts is unpacked after this module is imported.
    import psutil

    used = {path.name for path in _mapped_files(psutil.pids())}
    for path in _shared_memory_files():
        if path.name in names - used and path.name.startswith(prefixes):
            with contextlib.suppress(OSError):
                path.unlink()
    return not names & used


def _children() -> Iterator[int]:
    import psutil

    with contextlib.suppress(psutil.Error):
        for child in psutil.Process().children(recursive=True):
            yield child.pid


def _shared_memory_files() -> list[Path]:
    """Return the files of shared memory, of any process."""
    with contextlib.suppress(OSError):
        return [path for path in _SHARED_MEMORY.iterdir() if path.is_file()]
    return []


def _mapped_files(processes: Iterable[int]) -> list[Path]:
    """Return the files of shared memory that processes have in their address space."""
    # A semaphore got its name after it was mapped, and the kernel shows the name that it had then.
    # So files are compared by their inodes.
    inodes = set()
    for process in processes:
        # It may have ended, or belong to another user.
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process}/maps").read_bytes().split(b"\n"):
                # proc_pid_maps(5): address, permissions, offset, device, inode, path
                fields = line.split(maxsplit=5)
                if len(fields) > 5 and fields[5].startswith(b"/dev/shm/"):
                    inodes.add(int(fields[4]))
    found = []
    for path in _shared_memory_files():
        with contextlib.suppress(OSError):
            if path.stat().st_ino in inodes:
                found.append(path)
    return found
