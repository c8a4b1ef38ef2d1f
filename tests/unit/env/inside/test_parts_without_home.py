"""A user whose home cannot be written: the caches move, and the user's servers still find what a build unpacks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from vllm_env.base.cache import settle_home
from vllm_env.inside.parts_places import VARIABLE, places, without_home

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home that can be written."""
    for name in ("XDG_CACHE_HOME", "VLLM_ENV_CACHE", VARIABLE):
        monkeypatch.setenv(name, "")  # so that what the code under test sets is undone
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def test_a_home_that_can_be_written_changes_nothing(home: Path, tmp_path: Path) -> None:
    """The environment goes below it."""
    settle_home(tmp_path / "tools", without_home())
    assert os.environ[VARIABLE] == ""
    assert places()[0] == str(home / ".cache/vllm_env/unpacked")


@pytest.mark.parametrize("cache", ["", "own"])
def test_an_environment_goes_where_the_users_server_looks(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    """The server has neither the variable of the moved caches nor that of the environments."""
    home.rmdir()
    home.touch()
    if cache:
        monkeypatch.setenv("VLLM_ENV_CACHE", str(tmp_path / cache))
    servers = places()
    settle_home(tmp_path / "tools", without_home())
    assert os.environ["XDG_CACHE_HOME"] == str(tmp_path / (cache or "tools"))
    assert places()[0] in servers
    assert not places()[0].startswith(str(home))


def test_a_folder_that_the_user_names_stays_first(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds for builds and servers."""
    home.rmdir()
    home.touch()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "named"))
    settle_home(tmp_path / "tools", without_home())
    assert places()[0] == str(tmp_path / "named")
