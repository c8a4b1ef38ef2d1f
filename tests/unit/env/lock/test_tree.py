"""A source tree: what its digest covers, and that its copy is whole and shares nothing with it."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from support.small_build import head, make_tree
from vllm_env.base.errors import UsageError
from vllm_env.lock.tree import commit_of, copy_tree, history_of, tree_digest

if TYPE_CHECKING:
    from pathlib import Path


def _git(tree: Path, *arguments: str) -> str:
    who = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    return subprocess.check_output(["git", *who, "-C", tree, *arguments], text=True, stderr=subprocess.STDOUT).strip()


def _state(folder: Path) -> dict[str, tuple[object, ...]]:
    """Every name, mode, size and time below a folder."""
    found: dict[str, tuple[object, ...]] = {}
    for path in [folder, *folder.rglob("*")]:
        status = path.lstat()
        found[str(path)] = (status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return found


def _changed(before: dict[str, tuple[object, ...]], after: dict[str, tuple[object, ...]]) -> set[str]:
    return {path for path, _ in before.items() ^ after.items()}


def test_a_tree_is_known_by_its_content(tmp_path: Path) -> None:
    """What builds and tools leave in it does not count; a changed line, a new, renamed or executable file do."""
    tree = make_tree(tmp_path / "tree")
    (tree / "requirements" / "build").mkdir(parents=True)
    (tree / "requirements" / "build" / "cuda.txt").write_text("torch\n")
    first = tree_digest(tree)
    for left in ("build/left.o", "vllm/__pycache__/x.pyc", ".git/index", ".deps/x/y.cu"):
        (tree / left).parent.mkdir(parents=True, exist_ok=True)
        (tree / left).write_text("x")
    for tool, mark in ((".venv", "pyvenv.cfg"), (".mypy_cache", "CACHEDIR.TAG"), ("rust/target", "CACHEDIR.TAG")):
        (tree / tool).mkdir(parents=True)
        (tree / tool / mark).touch()
        (tree / tool / "left").write_text("x")
    assert tree_digest(tree) == first
    seen = {first}

    def is_new() -> bool:
        size = len(seen)
        seen.add(tree_digest(tree))
        return len(seen) > size

    (tree / "vllm" / "new.py").write_text("")
    assert is_new()
    (tree / "vllm" / "new.py").rename(tree / "vllm" / "other.py")
    assert is_new()
    (tree / "vllm" / "other.py").write_text("x = 1")
    assert is_new()
    (tree / "vllm" / "other.py").chmod(0o755)
    assert is_new()
    # a folder named build that is not at the top is vLLM's own
    (tree / "requirements" / "build" / "cuda.txt").write_text("torch==2\n")
    assert is_new()
    # git ignores it, and it would get into the wheel
    (tree / "vllm" / "vllm-rs").write_text("compiled")
    assert is_new()
    (tree / "vllm" / "alias.py").symlink_to("other.py")
    assert is_new()


def test_the_egg_info_of_a_source_archive_counts(tmp_path: Path) -> None:
    """It lists the data files that setuptools packs. In a git checkout, git lists them."""
    for git in (False, True):
        tree = make_tree(tmp_path / f"tree{git}", git=git)
        first = tree_digest(tree)
        (tree / "vllm.egg-info").mkdir()
        (tree / "vllm.egg-info" / "SOURCES.txt").write_text("vllm/data.json\n")
        assert (tree_digest(tree) == first) == git


def test_a_copy_is_the_same_tree_and_shares_no_file(tmp_path: Path) -> None:
    """It has the same digest; a file that is written in place in the copy is not the tree's."""
    tree = make_tree(tmp_path / "tree")
    (tree / "vllm" / "tool.sh").write_text("#!/bin/sh\n")
    (tree / "vllm" / "tool.sh").chmod(0o555)
    (tree / "vllm" / os.fsdecode(b"name-\xff.py")).write_text("")
    before = _state(tree)
    copy_tree(tree, tmp_path / "copy")
    assert tree_digest(tmp_path / "copy") == tree_digest(tree)
    copies = [path for path in (tmp_path / "copy").rglob("*") if path.is_file()]
    assert len(copies) == 4
    for path in copies:
        with path.open("a") as file:
            file.write("written in place")
    assert _state(tree) == before


def test_a_link_that_leaves_the_tree_is_copied_as_what_it_leads_to(tmp_path: Path) -> None:
    """Also an absolute one into the tree: a build would otherwise write to the user's file."""
    tree = make_tree(tmp_path / "tree")
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "kernel.cu").write_text("shared")
    (tree / "csrc").symlink_to("../shared")
    (tree / "vllm" / "absolute.py").symlink_to(tree / "vllm" / "__init__.py")
    (tree / "vllm" / "relative.py").symlink_to("__init__.py")
    (tree / "vllm" / "dangling.py").symlink_to("/nonexistent")
    os.mkfifo(tree / "pipe")
    first = tree_digest(tree)
    copy = tmp_path / "copy"
    copy_tree(tree, copy)
    assert tree_digest(copy) == first
    assert (copy / "csrc" / "kernel.cu").read_text() == "shared"
    links = {path.name for path in copy.rglob("*") if path.is_symlink()}
    assert links == {"relative.py"}
    assert (copy / "vllm" / "absolute.py").read_text() == (tree / "vllm" / "__init__.py").read_text()
    (tmp_path / "shared" / "kernel.cu").write_text("changed")
    assert tree_digest(tree) != first


def test_a_link_to_a_folder_around_the_tree_is_refused(tmp_path: Path) -> None:
    """It would be copied without an end."""
    tree = make_tree(tmp_path / "tree")
    (tree / "loop").symlink_to(tmp_path)
    with pytest.raises(UsageError, match=f"contains itself: loop leads to {tmp_path}"):
        tree_digest(tree)


@pytest.mark.parametrize("kind", ["checkout", "worktree", "shallow"])
def test_a_copy_has_the_history_of_its_tree(kind: str, tmp_path: Path) -> None:
    """Commit, tags and clean state are those of the tree, which stays as it is; a commit in the copy is not one of the tree."""
    origin = make_tree(tmp_path / "origin", git=True)
    _git(origin, "tag", "-m", "a release", "v0.99.0")
    (origin / "README.md").write_text("more\n")
    _git(origin, "add", ".")
    _git(origin, "commit", "--quiet", "--message", "More")
    tree = tmp_path / "tree"
    if kind == "worktree":
        _git(origin, "worktree", "add", "--quiet", "--detach", str(tree))
    elif kind == "shallow":
        _git(tmp_path, "clone", "--quiet", "--depth", "2", origin.as_uri(), str(tree))
    else:
        shutil.copytree(origin, tree)
    before = (_state(tree), _state(origin))
    copy = tmp_path / "copy"
    copy_tree(tree, copy)
    assert commit_of(copy) == commit_of(tree) == head(origin)
    assert history_of(copy) == history_of(tree) == f"v0.99.0-1-g{head(origin)}"
    assert _git(copy, "describe", "--dirty", "--tags") == _git(copy, "describe", "--tags")
    (copy / "README.md").write_text("changed\n")
    assert _git(copy, "describe", "--dirty", "--tags").endswith("-dirty")
    assert [_changed(*both) for both in zip(before, (_state(tree), _state(origin)), strict=True)] == [set(), set()]
    _git(copy, "commit", "--quiet", "--all", "--message", "Of the build")
    assert commit_of(tree) == head(tree) == head(origin) != head(copy)


def test_a_folder_within_a_checkout_has_no_history(tmp_path: Path) -> None:
    """The checkout around it is not vLLM's."""
    outer = make_tree(tmp_path / "outer", git=True)
    tree = make_tree(outer / "tree")
    assert (commit_of(tree), history_of(tree)) == ("", "")
    copy_tree(tree, tmp_path / "copy")
    assert not (tmp_path / "copy" / ".git").exists()
