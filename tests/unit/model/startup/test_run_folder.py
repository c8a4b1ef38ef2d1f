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
import sys
from pathlib import Path
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from triton_vllm.startup.run_folder import RunFolder

folder = RunFolder(Path(sys.argv[1]))
memory = SharedMemory(create=True, size=4096)
resource_tracker.unregister(memory._name, "shared_memory")
folder.note_memory()
print(memory.name, flush=True)
input()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A process with a folder and shared memory, and the memory's file."""
    path = {**os.environ, "PYTHONPATH": str(Path(triton_vllm.__file__).parents[1])}
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDS_MEMORY, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=path
    )
    assert process.stdout
    name = process.stdout.readline().decode().strip()
    assert name
    memory = run_folder._MEMORY / name
    try:
        yield process, memory
    finally:
        process.kill()
        process.communicate()
        memory.unlink(missing_ok=True)


def test_a_process_that_lives_keeps_its_folder_and_memory(holder, tmp_path):
    """Another start passes them over."""
    _, memory = holder
    sweep(tmp_path)
    assert len(list(tmp_path.glob("*/memory"))) == 1
    assert memory.exists()


def test_what_a_killed_process_left_is_removed(holder, tmp_path):
    """Its folder with sockets, and its shared memory."""
    process, memory = holder
    process.kill()
    process.communicate()
    assert memory.exists()
    (folder,) = tmp_path.iterdir()
    (folder / "socket").touch()
    sweep(tmp_path)
    assert not list(tmp_path.iterdir())
    assert not memory.exists()


def test_memory_that_another_process_still_uses_stays(holder, tmp_path):
    """A server goes on with its region when its model's process was killed."""
    process, file = holder
    memory = SharedMemory(file.name)
    process.kill()
    process.communicate()
    sweep(tmp_path)
    assert file.exists()
    memory.close()
    memory.unlink()


def test_memory_that_processes_of_another_container_may_use_stays(holder, tmp_path):
    """They cannot be seen from here; the folder's lock shows that its own process has ended."""
    process, memory = holder
    (noted,) = tmp_path.glob("*/memory")
    noted.write_text(json.dumps({**json.loads(noted.read_text()), "space": "another"}))
    process.kill()
    process.communicate()
    sweep(tmp_path)
    assert not list(tmp_path.iterdir())
    assert memory.exists()


@pytest.mark.parametrize("text", [None, "", '{"space":'])
def test_a_process_that_was_killed_during_its_load_is_no_obstacle(tmp_path, text):
    """It has written nothing, or half of it."""
    folder = tmp_path / "vllm_env_run_x"
    folder.mkdir()
    if text is not None:
        (folder / "memory").write_text(text)
    sweep(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_of_another_user_stays(tmp_path, monkeypatch):
    """The names in it could lead anywhere."""
    folder = tmp_path / "vllm_env_run_x"
    folder.mkdir()
    (tmp_path / "vllm_env_run_link").symlink_to(folder)
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    sweep(tmp_path)
    assert folder.is_dir()


def test_a_link_is_not_followed(tmp_path):
    """It is removed by nobody, and neither is what it names."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (tmp_path / "vllm_env_run_link").symlink_to(folder)
    sweep(tmp_path)
    assert folder.is_dir()


def test_a_folder_is_locked_and_private_until_it_is_removed(tmp_path):
    """And short enough for a socket, or it says that it is not."""
    made = RunFolder(tmp_path)
    assert made.path.stat().st_mode & 0o777 == 0o700
    sweep(tmp_path)
    assert made.path.is_dir()
    made.remove()
    assert not list(tmp_path.iterdir())
    (deep := tmp_path / ("d" * 107)).mkdir()
    assert not RunFolder(deep).fits
