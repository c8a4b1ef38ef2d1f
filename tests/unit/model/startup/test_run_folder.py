"""What a killed process has left behind is removed by the next start, and nothing that is still used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import triton_vllm
from triton_vllm.startup import run_folder
from triton_vllm.startup.run_folder import RunFolder, sweep

if TYPE_CHECKING:
    from collections.abc import Iterator

# Python would otherwise remove it with the last process that has opened it.
_HOLDS_MEMORY = """
import mmap, multiprocessing, os, sys
from pathlib import Path
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from triton_vllm.startup.run_folder import RunFolder

home = sys.argv[1]
# a file with a name that is not UTF-8, as a model's folder may have it
strange = os.open(os.fsencode(home) + b"/caf\\xe9", os.O_RDWR | os.O_CREAT)
os.ftruncate(strange, 4096)
mapped = [mmap.mmap(strange, 4096)]
before = SharedMemory(os.environ["OTHERS"])
resource_tracker.unregister(before._name, "shared_memory")
folder = RunFolder(Path(home))
memory = SharedMemory(create=True, size=4096)
resource_tracker.unregister(memory._name, "shared_memory")
lock = multiprocessing.get_context("spawn").Lock()
resource_tracker.unregister(lock._semlock.name, "semaphore")
folder.note_memory()
print(memory.name, "sem." + lock._semlock.name[1:], flush=True)
input()
"""


class Holder:
    """A process with a folder.

    Attributes:
        process: the process.
        memory: its shared memory and its semaphore.
        others: shared memory that was there before, and that it uses as well.
    """

    def __init__(self, home: Path, others: SharedMemory) -> None:
        path = {**os.environ, "PYTHONPATH": str(Path(triton_vllm.__file__).parents[1]), "OTHERS": others.name}
        command = [sys.executable, "-c", _HOLDS_MEMORY, home]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=path)
        assert self.process.stdout
        names = self.process.stdout.readline().decode().split()
        assert len(names) == 2
        self.memory = [run_folder._SHARED_MEMORY / name for name in names]
        self.others = run_folder._SHARED_MEMORY / others.name

    def kill(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def holder(home: Path) -> Iterator[Holder]:
    """A process with a folder."""
    others = SharedMemory(create=True, size=4096)
    holder = Holder(home, others)
    try:
        yield holder
    finally:
        holder.kill()
        for path in holder.memory:
            path.unlink(missing_ok=True)
        others.close()
        others.unlink()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The folder for temporary files."""
    return tmp_path


def folders(home: Path) -> list[Path]:
    """Return the folders that are left."""
    return list(home.glob("*vllm_env_run_*"))


def exist(holder: Holder) -> list[bool]:
    """Return which of a holder's files exist."""
    return [path.exists() for path in holder.memory]


def test_a_process_that_lives_keeps_its_folder_and_memory(holder, home):
    """Another start passes them over."""
    sweep(home)
    (folder,) = folders(home)
    noted = json.loads((folder / "memory").read_text())
    assert set(noted["names"]) == {path.name for path in holder.memory}
    assert exist(holder) == [True, True]


def test_what_a_killed_process_left_is_removed(holder, home):
    """Its folder with sockets, its shared memory and its semaphore; not what was there before."""
    holder.kill()
    assert exist(holder) == [True, True]
    (folder,) = folders(home)
    (folder / "socket").touch()
    sweep(home)
    assert folders(home) == []
    assert exist(holder) == [False, False]
    assert holder.others.exists()


def test_memory_that_another_process_still_uses_stays_until_that_one_has_ended(holder, home):
    """A server goes on with its region when its model's process was killed."""
    memory = SharedMemory(holder.memory[0].name)
    holder.kill()
    sweep(home)
    assert exist(holder) == [True, False]
    assert folders(home)
    memory.close()
    sweep(home)
    assert exist(holder) == [False, False]
    assert folders(home) == []


def test_memory_that_processes_of_another_container_may_use_stays(holder, home):
    """They cannot be seen from here; the folder's lock shows that its own process has ended."""
    (folder,) = folders(home)
    noted = folder / "memory"
    noted.write_text(json.dumps({**json.loads(noted.read_text()), "space": "another"}))
    holder.kill()
    sweep(home)
    assert folders(home) == []
    assert exist(holder) == [True, True]


@pytest.mark.parametrize("text", [None, "", '{"space":', "{}", "[]", '{"space": "", "names": 1}'])
def test_a_process_that_was_killed_during_its_load_is_no_obstacle(home, text):
    """It has written nothing, half of it, or what another version wrote."""
    folder = home / "vllm_env_run_x"
    folder.mkdir()
    if text is not None:
        (folder / "memory").write_text(text)
    sweep(home)
    assert folders(home) == []


def test_a_folder_of_another_user_stays(home, monkeypatch):
    """The names in it could lead anywhere."""
    folder = home / "vllm_env_run_x"
    folder.mkdir()
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    sweep(home)
    assert folder.is_dir()


def test_a_link_is_not_followed(home):
    """It is removed by nobody, and neither is what it names."""
    folder = home / "mine"
    folder.mkdir()
    (folder / "memory").touch()
    link = home / "vllm_env_run_link"
    link.symlink_to(folder)
    sweep(home)
    assert link.is_symlink()
    assert (folder / "memory").exists()


def test_a_folder_is_locked_and_private_until_it_is_removed(home):
    """And short enough for a socket, or it says that it is not."""
    made = RunFolder(home)
    assert made.path.stat().st_mode & 0o777 == 0o700
    sweep(home)
    assert made.path.is_dir()
    made.remove()
    assert folders(home) == []
    (deep := home / ("d" * 107)).mkdir()
    assert not RunFolder(deep).fits


_MAKES_MEMORY = """
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4096)
cache = SharedMemory(f"cache_{memory.name}", create=True, size=4096)
for made in memory, cache:
    resource_tracker.unregister(made._name, "shared_memory")
print(memory.name, flush=True)
input()
"""


def test_the_memory_of_a_killed_child_is_removed_at_the_end(home: Path) -> None:
    """VLLM kills slow workers and their resource trackers; what a living process uses stays."""
    folder = RunFolder(home)
    own = SharedMemory(create=True, size=4096)
    try:
        command = [sys.executable, "-c", _MAKES_MEMORY]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            memory = run_folder._SHARED_MEMORY / child.stdout.readline().strip()
            cache = memory.with_name(f"cache_{memory.name}")  # another container may use it, too
            folder.note_memory()
            child.kill()
        assert memory.is_file()
        folder.note_memory()
        folder.remove()
        assert not memory.exists()
        cache.unlink()
        assert (run_folder._SHARED_MEMORY / own.name).is_file()
    finally:
        own.close()
        own.unlink()
    assert not folder.path.exists()
