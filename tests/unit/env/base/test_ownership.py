"""Ownership, as publishing uses it: root leaves nothing of root's in a host user's folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.repositories import CHECKOUT
from support.small_fixtures import workspace_in
from vllm_env.base.filesystem import Owner, give, owner_of, write_whole
from vllm_env.layout.layouts import LAYOUTS
from vllm_env.publish import publish as module
from vllm_env.publish.model_folder import BUILT_NAMES, BuiltSet
from vllm_env.publish.publish import publish

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files for others")

_TEMPLATE = CHECKOUT / "model_repository" / "vllm"
_WORKSPACE = workspace_in(Path("/nonexistent/cache"))
_HOST = Owner(12345, 23456)
_OTHER = Owner(12346, 23456)


def _chown_tree(folder: Path, owner: Owner) -> None:
    for path in (folder, *folder.rglob("*")):
        os.chown(path, owner.uid, owner.gid, follow_symlinks=False)


def _owners(folder: Path) -> dict[str, Owner]:
    return {str(p.relative_to(folder)): owner_of(p) for p in (folder, *folder.rglob("*"))}


def _built(folder: Path, tag: str, layout: str = "archive") -> BuiltSet:
    environment = folder / f"environment-{tag}"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").write_text(tag)
    (environment / "bin" / "python3").symlink_to("python")
    (folder / f"stub-{tag}").write_text(tag)
    (folder / f"archive-{tag}").write_text(tag)
    place = environment if layout == "directory" else folder / f"archive-{tag}"
    return BuiltSet(folder / f"stub-{tag}", place, LAYOUTS[layout], "{}", "{}")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A host user's checkout, still without a repository."""
    (tmp_path / "place").mkdir()
    _chown_tree(tmp_path / "place", _HOST)
    return tmp_path / "place"


@pytest.fixture(params=["exchange", "in place"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of placing."""
    if request.param == "in place":
        monkeypatch.setattr(module, "staging_place", lambda _: None)


@pytest.fixture(params=["hard links", "copies"])
def hard_links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """With the cache on the repository's file system, and on another one, as in a container."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    if request.param == "copies":
        monkeypatch.setattr(os, "link", refuse)
    return str(request.param) == "hard links"


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("layout", ["archive", "directory"])
def test_all_that_is_placed_is_the_host_users(place: Path, tmp_path: Path, hard_links: bool, layout: str) -> None:
    """A new repository and model, then a build over it in which each file of the user's keeps its owner."""
    model = publish(_WORKSPACE, _built(tmp_path / "cache", "one", layout), place / "new" / "models", "vllm", _TEMPLATE)
    archive = {"new/models/vllm/vllm_env.tar.gz"} if layout == "archive" and hard_links else set()
    assert {path for path, owner in _owners(place).items() if owner != _HOST} == archive  # a link to the cache's file
    (model / "adapters" / "mine").mkdir(parents=True)
    (model / "adapters" / "mine" / "weights").write_text("mine")
    (model / "adapters" / "link").symlink_to("mine")
    _chown_tree(model / "adapters", _OTHER)
    _chown_tree(model / "adapters" / "mine", _HOST)
    before = _owners(model)
    publish(_WORKSPACE, _built(tmp_path / "cache", "two", layout), place / "new" / "models", "vllm", _TEMPLATE)
    assert _owners(model) == before
    assert before["adapters/link"] == _OTHER
    assert (model / ("vllm_env/bin/python" if layout == "directory" else "vllm_env.tar.gz")).read_text() == "two"


@pytest.mark.usefixtures("way")
def test_what_an_older_build_left_as_roots_is_mended(place: Path, tmp_path: Path) -> None:
    """The set follows the folder, not the set before; config.pbtxt that a new layout rewrites keeps its owner."""
    model = publish(_WORKSPACE, _built(tmp_path / "cache", "one"), place / "models", "vllm", _TEMPLATE)
    for name in (n for n in BUILT_NAMES if (model / n).exists()):
        os.chown(model / name, 0, 0)
    os.chown(model / "config.pbtxt", _OTHER.uid, _OTHER.gid)
    publish(_WORKSPACE, _built(tmp_path / "cache", "two", "directory"), place / "models", "vllm", _TEMPLATE)
    owners = _owners(model)
    assert owners.pop("config.pbtxt") == _OTHER
    assert set(owners.values()) == {_HOST}


def test_the_caches_own_archive_stays_roots(place: Path, tmp_path: Path) -> None:
    """It is the same file as the published one, and root will place it again: nobody else may write it."""
    built = _built(tmp_path / "cache", "one")
    model = publish(_WORKSPACE, built, place / "models", "vllm", _TEMPLATE)
    assert (model / "vllm_env.tar.gz").samefile(built.environment)
    assert owner_of(built.environment) == Owner(0, 0)


def test_roots_own_repository_stays_roots(tmp_path: Path) -> None:
    """Where nobody else has a folder."""
    publish(_WORKSPACE, _built(tmp_path / "cache", "one"), tmp_path / "models", "vllm", _TEMPLATE)
    assert set(_owners(tmp_path / "models").values()) == {Owner(0, 0)}


def test_only_what_root_has_made_is_given_and_a_link_is_not_followed(tmp_path: Path) -> None:
    """A third user's file is theirs."""
    (tmp_path / "theirs").touch()
    os.chown(tmp_path / "theirs", _OTHER.uid, _OTHER.gid)
    (tmp_path / "roots").touch()
    (tmp_path / "link").symlink_to("roots")
    for name in ("theirs", "link"):
        give(tmp_path / name, _HOST)
    assert [owner_of(tmp_path / n) for n in ("theirs", "roots", "link")] == [_OTHER, Owner(0, 0), _HOST]


def test_a_written_file_is_its_folders_owners_or_stays_whose_it_was(place: Path) -> None:
    """A lock or a spec in a user's checkout."""
    write_whole(place / "new.toml", "new")
    assert owner_of(place / "new.toml") == _HOST
    os.chown(place / "new.toml", _OTHER.uid, _OTHER.gid)
    write_whole(place / "new.toml", "newer")
    assert owner_of(place / "new.toml") == _OTHER
