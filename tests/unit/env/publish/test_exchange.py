"""Staging folders and the exchange of two folders in one step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from vllm_env.publish.exchange import STAGING_PREFIX, exchange, remove_abandoned_staging, staging_in

if TYPE_CHECKING:
    pass


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders, each with a file that has the folder's name."""
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    return tmp_path / "one", tmp_path / "other"


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_a_file_system_that_cannot_is_told(folders: tuple[Path, Path], elsewhere: Path) -> None:
    """Another file system, as a container's volumes are: no error, and nothing has moved."""
    (elsewhere / "far").touch()
    assert exchange(folders[0], elsewhere) is False
    assert (_names(folders[0]), _names(elsewhere)) == (["one"], ["far"])


def test_folders_that_may_not_be_moved_are_an_error(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Not taken for a file system that cannot: the caller would write into a place that is not there."""
    with pytest.raises(FileNotFoundError) as caught:
        exchange(folders[0], tmp_path / "gone")
    assert caught.value.filename == str(tmp_path / "gone")
    assert _names(folders[0]) == ["one"]


def test_staging_of_dead_builds_goes_and_of_living_ones_stays(tmp_path: Path) -> None:
    """Beside the repository and inside its models; the lock tells them apart, and not the name."""
    repository = tmp_path / "models"
    model = repository / "vllm"
    model.mkdir(parents=True)
    dead = [place / f"{STAGING_PREFIX}{name}" for place in (tmp_path, model) for name in ("abcd_123", str(os.getppid()))]
    for folder in dead:
        (folder / "vllm").mkdir(parents=True)
    with staging_in(tmp_path) as beside, staging_in(model) as inside:
        assert sorted(remove_abandoned_staging(repository)) == sorted(dead)
        assert not any(folder.exists() for folder in dead)
        assert beside.is_dir()
        assert inside.is_dir()
