"""The folder for temporary files in memory: only where there is room, and nothing of a killed run stays there."""

from __future__ import annotations

import os
import shutil
from types import SimpleNamespace
from typing import TYPE_CHECKING

import psutil
import pytest

from support import memory_folder as module
from support.memory_folder import memory_folder

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for ``/dev/shm``, which other runs use."""
    monkeypatch.setattr(module, "SHARED", tmp_path)
    monkeypatch.setattr(module, "_FREE", 0)
    monkeypatch.setattr(module, "_AVAILABLE", 0)
    return tmp_path


def test_folders_of_killed_runs_go(shared: Path) -> None:
    """Those of running ones, and those that are not of a run, stay; at the end a run's own goes."""
    killed, other = shared / "pytest_vllm_env_x", shared / "pytest-of-somebody"
    killed.mkdir()
    other.mkdir()
    with memory_folder() as first, memory_folder() as second:
        assert set(shared.iterdir()) == {other, first, second}
    assert list(shared.iterdir()) == [other]


def test_those_of_other_users_stay(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may remove them, and they may be those of another container."""
    (shared / "pytest_vllm_env_x").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with memory_folder():
        assert (shared / "pytest_vllm_env_x").exists()


@pytest.mark.parametrize("limit", ["_FREE", "_AVAILABLE"])
def test_none_without_room(shared: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """Of the file system, or of the machine."""
    monkeypatch.setattr(module, limit, max(shutil.disk_usage(shared).total, 1 << 50))
    with memory_folder() as folder:
        assert folder is None
    assert not list(shared.iterdir())


def test_none_where_programs_do_not_run(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Docker's usual ``/dev/shm``: tests write programs."""
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC))
    with memory_folder() as folder:
        assert folder is None


@pytest.mark.parametrize(("limit", "expected"), [("5000", 3000), ("max", 1 << 60), (str(1 << 62), 1 << 60)])
def test_a_containers_memory_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, expected: int) -> None:
    """What is in ``/dev/shm`` counts for it."""
    monkeypatch.setattr(module, "CGROUP", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 60))
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text("2000")
    assert module.available_memory() == expected
