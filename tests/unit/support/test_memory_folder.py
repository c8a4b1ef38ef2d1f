"""The folder for temporary files in memory: only where there is room, and nothing of a killed run stays there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from support import memory_folder

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for ``/dev/shm``, which other runs use."""
    monkeypatch.setattr(memory_folder, "SHARED", tmp_path)
    monkeypatch.setattr(memory_folder, "_FREE", 0)
    monkeypatch.setattr(memory_folder, "_AVAILABLE", 0)
    return tmp_path


def test_folders_of_killed_runs_go(shared: Path) -> None:
    """Those of running ones, and those that are not of a run, stay."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    killed, other = shared / f"pytest_vllm_env_{child.pid}_x", shared / "pytest_vllm_env_x"
    killed.mkdir()
    other.mkdir()
    first = memory_folder.make_memory_folder()
    second = memory_folder.make_memory_folder()
    assert first is not None
    assert second is not None
    assert first.name.startswith(f"pytest_vllm_env_{os.getpid()}_")
    assert set(shared.iterdir()) == {other, first, second}


@pytest.mark.parametrize("limit", ["_FREE", "_AVAILABLE"])
def test_none_without_room(shared: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """Of the file system, or of the machine."""
    monkeypatch.setattr(memory_folder, limit, max(shutil.disk_usage(shared).total, 1 << 50))
    assert memory_folder.make_memory_folder() is None
    assert not list(shared.iterdir())
