"""What dead servers left is found, what a running process uses is not."""

from __future__ import annotations

import mmap
import os
import re
import time
from typing import TYPE_CHECKING

from vllm_env import dead_servers

if TYPE_CHECKING:
    from pathlib import Path

PATTERN = re.compile(r"python_env_\w{6}")


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
    (found,) = dead_servers.find_abandoned(((tmp_path, PATTERN),))
    assert (found.path, found.size) == (left, 5000)
    found.remove()
    assert not left.exists()


def test_one_that_a_process_has_mapped_is_not(tmp_path: Path):
    """This very process maps a file of it, as a stub maps its libraries."""
    used = folder(tmp_path, "python_env_abc123")
    with (used / "0" / "data").open("rb") as stream:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        assert dead_servers.find_abandoned(((tmp_path, PATTERN),)) == []
    finally:
        mapped.close()
    assert len(dead_servers.find_abandoned(((tmp_path, PATTERN),))) == 1


def test_what_has_another_name_is_left_alone(tmp_path: Path):
    """Only the names that Triton and this tool give are looked at."""
    folder(tmp_path, "python_environment")
    folder(tmp_path, "my_data")
    assert dead_servers.find_abandoned(((tmp_path, PATTERN),)) == []


def test_one_younger_than_a_running_server_is_left_alone(tmp_path: Path, monkeypatch):
    """A server that is extracting right now has mapped nothing yet."""
    made = folder(tmp_path, "python_env_abc123")
    monkeypatch.setattr(dead_servers, "_oldest_server", lambda: made.lstat().st_mtime - 10)
    assert dead_servers.find_abandoned(((tmp_path, PATTERN),)) == []
