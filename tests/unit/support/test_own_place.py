"""What a run of the tests works on: a copy of the checkout as a clone has it, and caches filled from the user's."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from support import own_place

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout in which somebody has built a model."""
    folder = tmp_path / "mine"
    for name in ("README.md", "tests/test_new.py", "model_repository/vllm/config.pbtxt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / ".gitignore").write_text(
        "/model_repository/*/vllm_env.tar.gz\n/model_repository/*/vllm_engine_args.json\n/.triton/\n"
    )
    for name in ("model_repository/vllm/vllm_env.tar.gz", "model_repository/vllm/vllm_engine_args.json", ".triton/RELEASE"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("built")
    return folder


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's home with a cache."""
    home = tmp_path / "user"
    for name in (".cache/vllm_env/prefixes/k/env/bin/python", ".cache/vllm_env/build/left", ".config/pip/pip.conf"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(name)
    monkeypatch.setenv("HOME", str(home))
    for name in ("XDG_CACHE_HOME", "VLLM_ENV_CACHE", "UV_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    return home


def names(folder: Path) -> set[str]:
    """Return the files below a folder, without those of git."""
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() or path.is_symlink()}
    return {name for name in found if not name.startswith(".git/")}


@pytest.mark.parametrize("in_git", [True, False])
@pytest.mark.usefixtures("user")
def test_the_copy_is_what_a_clone_has(checkout: Path, tmp_path: Path, in_git: bool) -> None:
    """With what is not committed yet, without what is built; what the checkout no longer has goes at the next run."""
    if in_git:
        subprocess.run(["git", "-C", checkout, "init", "--quiet"], check=True)
    own_place.main(checkout, tmp_path / "data")
    copy = tmp_path / "data" / "checkout"
    sources = {".gitignore", "README.md", "tests/test_new.py", "model_repository/vllm/config.pbtxt"}
    assert names(copy) == {*sources, ".triton/RELEASE", ".tools"}
    (checkout / "tests/test_new.py").unlink()
    (checkout / "README.md").write_text("another text")
    (copy / "model_repository/vllm/vllm_env.tar.gz").write_text("a test's")
    own_place.main(checkout, tmp_path / "data")
    assert names(copy) == {*sources - {"tests/test_new.py"}, ".triton/RELEASE", ".tools"}
    assert (copy / "README.md").read_text() == "another text"
    tracked = subprocess.check_output(["git", "-C", copy, "ls-files"], text=True).splitlines()
    assert set(tracked) == sources - {"tests/test_new.py"}
    assert subprocess.check_output(["git", "-C", copy, "status", "--porcelain"], text=True) == ""


@pytest.mark.parametrize("can_link", [True, False])
def test_the_cache_is_filled_from_the_users(
    checkout: Path, user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_link: bool
) -> None:
    """By links or copies; what a build stages is not taken over, and what the own cache has stays."""
    if not can_link:

        def refused(*_: object, **__: object) -> None:
            raise OSError(18, "Invalid cross-device link")

        monkeypatch.setattr(os, "link", refused)
    own_place.main(checkout, tmp_path / "data")
    theirs = user / ".cache/vllm_env/prefixes/k/env/bin/python"
    ours = tmp_path / "data/cache/vllm_env/prefixes/k/env/bin/python"
    assert ours.read_text() == theirs.read_text()
    assert ours.samefile(theirs) == can_link
    assert not (tmp_path / "data/cache/vllm_env/build").exists()
    assert (tmp_path / "data/home/.config/pip/pip.conf").read_text() == ".config/pip/pip.conf"
    theirs.unlink()
    own_place.main(checkout, tmp_path / "data")
    assert ours.exists()


def test_what_goes_meanwhile_is_not_taken_over_by_half(
    checkout: Path, user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As when another build evicts it."""
    (user / ".cache/vllm_env/prefixes/k/env/bin/other").write_text("")

    def gone(source: str, target: str, **_: object) -> None:
        if source.endswith("other"):
            raise FileNotFoundError(2, "No such file or directory", source)
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", gone)
    monkeypatch.setattr(own_place.shutil, "copy2", _copy_unless_other)
    own_place.main(checkout, tmp_path / "data")
    assert list((tmp_path / "data/cache/vllm_env/prefixes").iterdir()) == []
    assert "is not taken over" in capsys.readouterr().err


def _copy_unless_other(source: object, target: object, **_: object) -> None:
    if str(source).endswith("other"):
        raise FileNotFoundError(2, "No such file or directory", str(source))
    with open(str(source), "rb") as given, open(str(target), "wb") as made:
        made.write(given.read())
