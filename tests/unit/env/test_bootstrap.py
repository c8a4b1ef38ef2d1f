"""The stamp of the packager's own environment, and the command for tests/run.sh; nothing is installed here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import bootstrap

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An environment with an interpreter and a lock, and no stamp yet."""
    folder = tmp_path / "venv-x"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/python").touch(mode=0o755)
    (tmp_path / "lock").write_text("tool==1.0\n")
    return folder


def test_only_the_whole_stamp_counts(folder: Path, tmp_path: Path) -> None:
    """A stamp that is a folder, or no text, is no stamp: the environment is made again."""
    lock = tmp_path / "lock"
    stamp = folder / ".stamp"
    stamp.mkdir()
    assert not bootstrap.is_made(folder, lock)
    bootstrap.remove_outdated(tmp_path / "venv-y")
    assert stamp.is_dir()
    stamp.rmdir()
    stamp.write_bytes(b"\xff")
    assert not bootstrap.is_made(folder, lock)
    stamp.write_text(bootstrap.stamp_of(lock), "utf-8")
    assert bootstrap.is_made(folder, lock)


def test_an_environment_without_its_interpreter_is_not_made(folder: Path, tmp_path: Path) -> None:
    """It is missing, or a link to one that is no longer installed."""
    lock = tmp_path / "lock"
    (folder / ".stamp").write_text(bootstrap.stamp_of(lock), "utf-8")
    assert bootstrap.is_made(folder, lock)
    (folder / "bin/python").unlink()
    assert not bootstrap.is_made(folder, lock)
    (folder / "bin/python").symlink_to(tmp_path / "removed")
    assert not bootstrap.is_made(folder, lock)


def test_an_entry_of_a_lock_is_its_version_and_its_digests(tmp_path: Path) -> None:
    """Neither that of a package whose name begins or ends alike, nor what follows."""
    lock = tmp_path / "lock"
    entry = "uv==0.1 \\\n    --hash=sha256:1 \\\n    --hash=sha256:2\n"
    lock.write_text(f"uv-build==0.1 \\\n    --hash=sha256:3\n{entry}zuv==1 --hash=sha256:4\n")
    assert bootstrap.entry_of("uv", lock) == entry
    assert bootstrap.entry_of("zuv", lock) == "zuv==1 --hash=sha256:4\n"
    assert bootstrap.entry_of("u", lock) == ""
