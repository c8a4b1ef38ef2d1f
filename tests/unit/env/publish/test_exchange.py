"""Staging folders and the exchange of two folders in one step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from vllm_env.publish.exchange import STAGING, exchange, remove_abandoned_staging, staging_in

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


def test_two_folders_change_places(folders: tuple[Path, Path]) -> None:
    """And what has one of them open keeps the folder that it opened."""
    one, other = folders
    opened = os.open(one, os.O_RDONLY)
    if not exchange(one, other):
        pytest.skip("this file system cannot exchange")
    assert (_names(one), _names(other)) == (["other"], ["one"])
    assert _names(Path(f"/proc/self/fd/{opened}")) == ["one"]
    os.close(opened)


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


def test_staging_is_gone_when_its_block_ends(tmp_path: Path) -> None:
    """Also by an interrupt, and with all that was staged."""
    with pytest.raises(KeyboardInterrupt), staging_in(tmp_path) as folder:  # noqa: PT012 - the block is the case
        (folder / "vllm" / "1").mkdir(parents=True)
        assert folder.parent == tmp_path
        assert folder.name.startswith(STAGING)
        raise KeyboardInterrupt
    assert _names(tmp_path) == []


def test_staging_of_dead_builds_goes_and_of_living_ones_stays(tmp_path: Path) -> None:
    """Beside the repository and inside its models; the lock tells them apart, and not the name."""
    repository = tmp_path / "models"
    model = repository / "vllm"
    model.mkdir(parents=True)
    dead = [place / f"{STAGING}{name}" for place in (tmp_path, model) for name in ("abcd_123", str(os.getppid()))]
    for folder in dead:
        (folder / "vllm").mkdir(parents=True)
    with staging_in(tmp_path) as beside, staging_in(model) as inside:
        assert sorted(remove_abandoned_staging(repository)) == sorted(dead)
        assert not any(folder.exists() for folder in dead)
        assert beside.is_dir()
        assert inside.is_dir()


def test_what_has_another_name_stays(tmp_path: Path) -> None:
    """The folder beside the repository is the user's, and so is what lies deeper in a model."""
    kept = [tmp_path / "staging-1", tmp_path / ".vllm_env", tmp_path / "models/vllm/1" / f"{STAGING}abcd_123"]
    for folder in kept:
        folder.mkdir(parents=True)
    assert remove_abandoned_staging(tmp_path / "models") == []
    assert all(folder.is_dir() for folder in kept)


def test_a_relative_repository_is_looked_at_from_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--model-repository models``: the folder beside it is that of the working folder."""
    (tmp_path / f"{STAGING}abcd_123").mkdir()
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    assert remove_abandoned_staging(Path("models")) == [tmp_path / f"{STAGING}abcd_123"]
