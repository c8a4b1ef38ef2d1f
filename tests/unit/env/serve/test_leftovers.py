"""What dead servers left is found, what a running process uses is not."""

from __future__ import annotations

import mmap
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from vllm_env.serve import leftovers

if TYPE_CHECKING:
    from collections.abc import Iterator

PATTERN = re.compile(r"python_env_\w{6}")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that the kernel names tritonserver; it ends with its input."""
    program = tmp_path / "bin" / "tritonserver"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho ready\nread line\n")
    program.chmod(0o755)
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert running.stdout
        assert running.stdout.readline() == b"ready\n"
        yield running


def folder(parent: Path, name: str) -> Path:
    made = parent / name
    (made / "0").mkdir(parents=True)
    (made / "0" / "data").write_bytes(b"x" * 5000)
    old = time.time() - 10**8  # older than any server that may run here
    os.utime(made, (old, old))
    return made


def test_an_unused_environment_is_found_and_removed(tmp_path: Path):
    """Its size is that of its files, and after ``remove`` it is gone."""
    left = folder(tmp_path, "python_env_abc123")
    (found,) = leftovers.find_abandoned(((tmp_path, PATTERN),))
    assert (found.path, found.size) == (left, 5000)
    found.remove()
    assert not left.exists()


def test_one_that_a_process_has_mapped_is_not(tmp_path: Path):
    """This very process maps a file of it, as a stub maps its libraries."""
    used = folder(tmp_path, "python_env_abc123")
    with (used / "0" / "data").open("rb") as stream:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        assert leftovers.find_abandoned(((tmp_path, PATTERN),)) == []
    finally:
        mapped.close()
    assert len(leftovers.find_abandoned(((tmp_path, PATTERN),))) == 1


def test_one_younger_than_a_running_server_is_left_alone(tmp_path: Path, monkeypatch):
    """A server that is extracting right now has mapped nothing yet."""
    made = folder(tmp_path, "python_env_abc123")
    monkeypatch.setattr(leftovers, "_oldest_server", lambda: made.lstat().st_mtime - 10)
    assert leftovers.find_abandoned(((tmp_path, PATTERN),)) == []


_HOLDER = """
import multiprocessing, os, signal
from multiprocessing.resource_tracker import _resource_tracker
lock = multiprocessing.get_context("spawn").Lock()
print(_resource_tracker._pid, "sem." + lock._semlock.name[1:], flush=True)
signal.pause()
"""


def test_a_semaphore_of_a_killed_process_is_found(monkeypatch: pytest.MonkeyPatch):
    """Python's multiprocessing unlinks it at its end, and so would its tracker; vLLM's are killed both."""
    monkeypatch.setattr(leftovers, "_oldest_server", lambda: float("inf"))  # other tests' servers are older than this one
    with subprocess.Popen([sys.executable, "-c", _HOLDER], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout
        tracker, name = holder.stdout.readline().split()
        path = Path("/dev/shm") / name
        held = [entry.path for entry in leftovers.find_abandoned()]
        os.kill(int(tracker), signal.SIGKILL)
        holder.kill()
    assert path not in held
    (found,) = [entry for entry in leftovers.find_abandoned() if entry.path == path]
    found.remove()
    assert not path.exists()


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Private copies of vLLM's caches in both places, beside what belongs to others or has another name."""
    temporary = tmp_path / "temporary"
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    folder(temporary, "vllm_env_warm_mine")
    folder(tmp_path / "cache" / "standins", "1234")
    own = f"vllm_env_warm_{os.getuid()}"
    return [folder(tmp_path / "cache" / "warm", "1234"), folder(temporary, own)]


def _private(root: Path) -> list[Path]:
    below = root.parent
    return [entry.path for entry in leftovers.find_private_caches({root}) if entry.path.is_relative_to(below)]


def test_private_caches_are_found_in_both_places(tmp_path: Path, copies: list[Path]):
    """In the cache folder, and below the folder for temporary files, which is taken when the home is read-only."""
    assert _private(tmp_path / "cache") == copies


@pytest.mark.usefixtures("server")
def test_a_running_server_is_seen():
    """By what the kernel calls it; its private caches stay (tests/unit/env/cli/test_commands.py)."""
    assert leftovers.server_runs()


def test_a_server_that_has_ended_does_not_count(server: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch):
    """Nor while its parent has not yet asked for its status."""
    one = psutil.Process(server.pid)
    monkeypatch.setattr(psutil, "process_iter", lambda: [one])  # other tests' servers come and go
    assert len(leftovers._servers()) == 1
    server.kill()
    os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
    assert Path(f"/proc/{server.pid}/comm").read_text() == "tritonserver\n"
    assert leftovers._servers() == []
