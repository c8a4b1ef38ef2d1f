"""Every way to pin a vLLM, by the real command line: file, URL, source tree, commit with and without a ready wheel."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from support import small_build
from support.cuda_indexes import Quiet, serving_folder
from support.small_fixtures import workspace_in
from support.wheels import write_wheel
from vllm_env.base.errors import UsageError, VllmEnvError
from vllm_env.base.filesystem import file_sha256
from vllm_env.base.network import Network, read_pip_config
from vllm_env.lock.pins import NotKnownError, resolve_pin
from vllm_env.lock.spec import Pin, Spec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.chaos_lab import Lab
    from vllm_env.lock.pins import PinnedVllm


class _Refusing(Quiet):
    def do_GET(self) -> None:  # noqa: N802 - the standard library's name
        self.send_error(403)


@pytest.fixture
def index(small_tree: Path, small_wheel: Path, tmp_path: Path) -> Iterator[str]:
    """A per-commit wheel index that has the small tree's commit and no other."""
    folder = tmp_path / "index" / small_build.head(small_tree) / "vllm"
    folder.mkdir(parents=True)
    shutil.copy(small_wheel, folder)
    (folder / "index.html").write_text(f'<a href="{small_wheel.name}">{small_wheel.name}</a>')
    with serving_folder(tmp_path / "index") as url:
        yield url


def _resolve(root: Path, pin: Pin, *, offline: bool = False, **fields: str) -> PinnedVllm:
    spec = Spec("cpu", pin, "vllm", "3.11", **fields)
    return resolve_pin(workspace_in(root, Network(read_pip_config(), offline)), spec)


def _forget_sources(cache: Path) -> None:
    """Remove what wheels were built from; with --offline, neither git nor uv could get it again."""
    shutil.rmtree(cache / "sources", ignore_errors=True)


def _manifest(repository: Path) -> dict[str, Any]:
    return dict(json.loads((repository / "vllm/vllm_env.json").read_text()))


def test_a_commit_is_taken_from_the_index_and_stands_in_the_manifest(
    index: str, small_tree: Path, thin_lab: Lab, tmp_path: Path
) -> None:
    """The whole build with --vllm-commit and --wheel-index: SHA, version and origin are told."""
    sha = small_build.head(small_tree)
    options = ["--spec", thin_lab.spec, "--vllm-commit", sha, "--wheel-index", index, "--git-url", "file:///nonexistent"]
    done = small_build.build(thin_lab.cache, tmp_path / "models", *options, **thin_lab.variables)
    assert done.returncode == 0, done.stderr
    vllm = _manifest(tmp_path / "models")["vllm"]
    assert vllm["commit"] == sha
    assert vllm["version"] == small_build.VERSION
    assert index in vllm["origin"]


@pytest.mark.usefixtures("small_cache")  # it has the interpreter that builds the wheel
def test_a_commit_without_a_wheel_is_built_from_git(index: str, small_tree: Path, tmp_path: Path) -> None:
    """The index has no such commit: the repository of --git-url is fetched at that very commit, and built once."""
    tree = tmp_path / "tree"
    shutil.copytree(small_tree, tree)
    (tree / "vllm/__init__.py").write_text('__version__ = "1.0.0"\n')
    (tree / "pyproject.toml").write_text((tree / "pyproject.toml").read_text().replace("0.99.0", "1.0.0"))
    commit = [
        "-c",
        "user.name=test",
        "-c",
        "user.email=test@localhost",
        "commit",
        "--quiet",
        "--all",
        "--message=Newer",
    ]
    subprocess.run(["git", "-C", tree, *commit], check=True)
    old, new = small_build.head(small_tree), small_build.head(tree)
    pinned = _resolve(tmp_path / "cache", Pin("commit", new), wheel_index=index, git_url=tree.as_uri())
    assert pinned.commit == new
    assert "vllm-1.0.0-" in pinned.requirement
    assert pinned.origin == f"git {tree.as_uri()} at {new}"
    # an older commit of the same repository is that one, and not the tip
    options: dict[str, Any] = {"wheel_index": "http://127.0.0.1:9", "git_url": tree.as_uri()}
    older = _resolve(tmp_path / "cache", Pin("commit", old), **options)
    assert "vllm-0.99.0-" in older.requirement
    assert older.commit == old
    # a wheel is kept by its commit
    _forget_sources(tmp_path / "cache")
    assert _resolve(tmp_path / "cache", Pin("commit", old), offline=True, **options) == older


def test_what_was_fetched_once_is_there_offline(index: str, small_tree: Path, tmp_path: Path) -> None:
    """--offline takes a commit's wheel from the cache, and refuses what was never fetched."""
    sha = small_build.head(small_tree)
    with pytest.raises(VllmEnvError, match=f"--offline: cannot fetch commit {sha}"):
        _resolve(tmp_path / "cache", Pin("commit", sha), wheel_index=index, offline=True)
    first = _resolve(tmp_path / "cache", Pin("commit", sha), wheel_index=index)
    assert _resolve(tmp_path / "cache", Pin("commit", sha), wheel_index=index, offline=True) == first


def test_a_variant_of_the_index_goes_first(index: str, small_tree: Path, small_wheel: Path, tmp_path: Path) -> None:
    """The folder of the torch backend holds another build of the same commit."""
    sha = small_build.head(small_tree)
    folder = tmp_path / "index" / sha / "cpu" / "vllm"
    folder.mkdir(parents=True)
    name = small_wheel.name.replace("0.99.0-", "0.99.0-1-")  # a build number: the same wheel, by another name
    shutil.copy(small_wheel, folder / name)
    (folder / "index.html").write_text(f'<a href="{name}">{name}</a>')
    pinned = _resolve(tmp_path / "cache", Pin("commit", sha), wheel_index=index, torch_backend="cpu")
    assert pinned.wheel
    assert pinned.wheel.name == name


def test_an_unknown_commit_names_sha_and_repository(index: str, small_tree: Path, tmp_path: Path) -> None:
    """Neither index nor git has it."""
    with pytest.raises(VllmEnvError, match=f"fetch commit {'f' * 40} from {small_tree.as_uri()}"):
        _resolve(tmp_path / "cache", Pin("commit", "f" * 40), wheel_index=index, git_url=small_tree.as_uri())
    assert list((tmp_path / "cache" / "build").iterdir()) == []


def _forecast(root: Path, sha: str, **fields: Any) -> str:
    """What a dry run says about the wheel of a commit that the cache does not have."""
    network = Network(read_pip_config(), offline=fields.pop("offline", False))
    workspace = replace(workspace_in(root, network), dry_run=True)
    with pytest.raises(NotKnownError) as caught:
        resolve_pin(workspace, Spec("cpu", Pin("commit", sha), "vllm", "3.11", **fields))
    return caught.value.forecast


def test_a_dry_run_asks_index_and_git_for_a_commit(index: str, small_tree: Path, tmp_path: Path) -> None:
    """A wheel, a build of hours, no such commit, or why it is unknown; no wheel and no sources are fetched."""
    sha = small_build.head(small_tree)
    ask: dict[str, Any] = {"wheel_index": index, "git_url": small_tree.as_uri()}
    found = f"to be fetched: the wheel index {index} has vllm {small_build.VERSION}"
    assert _forecast(tmp_path / "cache", sha, **ask) == found
    assert _forecast(tmp_path / "cache", sha, torch_backend="cpu", **ask) == found
    # an index without this commit
    (tmp_path / "index" / sha).rename(tmp_path / "index" / ("b" * 40))
    forecast = _forecast(tmp_path / "cache", sha, **ask)
    assert forecast.startswith(f"to be built from {small_tree.as_uri()}: the wheel index {index} has none")
    assert "hours" in forecast
    with pytest.raises(VllmEnvError, match=f"{'f' * 40}: there is no such commit") as caught:
        _forecast(tmp_path / "cache", "f" * 40, **ask)
    assert index in caught.value.cause
    assert small_tree.as_uri() in caught.value.cause
    with pytest.raises(VllmEnvError, match=f"fetch commit {sha} from {tmp_path.as_uri()}"):
        _forecast(tmp_path / "cache", sha, wheel_index=index, git_url=tmp_path.as_uri())
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_a_dry_run_says_who_does_not_answer(index: str, small_tree: Path, tmp_path: Path) -> None:
    """Unknown is not the same as missing: index, proxy and git are named, and --offline asks nobody."""
    closed, sha = "http://127.0.0.1:9", "f" * 40
    unknown = _forecast(tmp_path / "cache", sha, wheel_index=closed, git_url=small_tree.as_uri())
    assert unknown == f"unknown: the wheel index {closed} does not answer"
    unknown = _forecast(tmp_path / "cache", sha, wheel_index=index, git_url=f"{closed}/vllm.git")
    assert unknown.startswith(f"unknown: the wheel index {index} has none, and {closed}/vllm.git does not answer")
    offline = _forecast(tmp_path / "cache", small_build.head(small_tree), wheel_index=index, offline=True)
    assert offline == "unknown: with --offline the wheel index is not asked"
    with serving_folder(tmp_path, _Refusing) as refusing:
        unknown = _forecast(tmp_path / "cache", sha, wheel_index=refusing, git_url=small_tree.as_uri())
        assert unknown == f"unknown: the wheel index {refusing} answers 403 Client Error"


def test_no_message_has_a_password(index: str, tmp_path: Path) -> None:
    """Users copy messages into tickets, and the remote of a checkout often has a token."""
    closed, sha = "http://me:sec@ret@127.0.0.1:9", "f" * 40
    unknown = _forecast(tmp_path / "cache", sha, wheel_index=closed)
    assert unknown == "unknown: the wheel index http://****@127.0.0.1:9 does not answer"
    unknown = _forecast(tmp_path / "cache", sha, wheel_index=index, git_url="http://me:secret@127.0.0.1:9/vllm.git")
    assert "http://****@127.0.0.1:9/vllm.git does not answer" in unknown
    pin = Pin("wheel", f"{closed}/vllm-1-py3-none-any.whl")
    with pytest.raises(VllmEnvError) as caught:
        _resolve(tmp_path / "cache", pin)
    assert "ret@" not in f"{caught.value.what} {pin}"


@pytest.mark.usefixtures("small_cache")  # it has the interpreter that builds the wheel
def test_a_source_tree_is_built_with_its_commit(small_tree: Path, tmp_path: Path) -> None:
    """Clean: the commit is known, also the second time. Changed: none is claimed, and its wheel is kept by its content."""
    tree = tmp_path / "tree"
    shutil.copytree(small_tree, tree)
    first = _resolve(tmp_path / "cache", Pin("source", str(tree)))
    assert first.commit == small_build.head(tree)
    assert _resolve(tmp_path / "cache", Pin("source", str(tree))) == first
    (tree / "vllm/__init__.py").write_text('__version__ = "0.99.0"  # changed\n')
    changed = _resolve(tmp_path / "cache", Pin("source", str(tree)))
    assert changed.commit == ""
    assert changed.requirement != first.requirement
    _forget_sources(tmp_path / "cache")
    assert _resolve(tmp_path / "cache", Pin("source", str(tree)), offline=True) == changed


def test_a_wheel_file_is_pinned_by_its_digest(small_wheel: Path, tmp_path: Path) -> None:
    """The requirement names the file and its SHA-256."""
    pinned = _resolve(tmp_path / "cache", Pin("wheel", str(small_wheel)))
    assert pinned.requirement == f"vllm @ {small_wheel.as_uri()}#sha256={file_sha256(small_wheel)}"
    assert pinned.wheel == small_wheel


def test_a_wheel_by_url_is_fetched_once(small_wheel: Path, tmp_path: Path) -> None:
    """Then it is in the cache: the server may be gone, and --offline is enough."""
    with serving_folder(small_wheel.parent) as url:
        address = f"{url}/{small_wheel.name}"
        first = _resolve(tmp_path / "cache", Pin("wheel", address))
    assert first.wheel
    assert file_sha256(first.wheel) == file_sha256(small_wheel)
    assert _resolve(tmp_path / "cache", Pin("wheel", address), offline=True) == first
    with pytest.raises(VllmEnvError, match="--offline"):
        _resolve(tmp_path / "other", Pin("wheel", address), offline=True)


def test_a_quoted_local_version_is_fetched_once(tmp_path: Path) -> None:
    """A URL has ``%2B`` for the "+" of a local version: the cached file is found by it all the same."""
    name = write_wheel(tmp_path, "vllm", "0.99.0+cpu", {"vllm/__init__.py": b""}).file
    with serving_folder(tmp_path) as url:
        pin = Pin("wheel", f"{url}/{name.replace('+', '%2B')}")
        first = _resolve(tmp_path / "cache", pin)
    assert _resolve(tmp_path / "cache", pin, offline=True) == first
    assert first.wheel
    assert first.wheel.name == name


@pytest.mark.parametrize("case", ["cut off", "another package", "misnamed", "no zip"])
def test_files_that_are_no_wheel_of_vllm_are_refused(case: str, small_wheel: Path, tmp_path: Path) -> None:
    """Wrong usage, with the file's name and what is wrong about it."""
    file = tmp_path / small_wheel.name
    shutil.copy(small_wheel, file)
    if case == "cut off":
        file.write_bytes(small_wheel.read_bytes()[:-100])
    elif case == "misnamed":
        file = file.rename(tmp_path / "vllm.whl")
    elif case == "no zip":
        file.write_text("<html>not found</html>")
    else:
        write_wheel(tmp_path, "vllm", small_build.VERSION, {"other/__init__.py": b""})
    with pytest.raises(UsageError) as caught:
        _resolve(tmp_path / "cache", Pin("wheel", str(file)))
    assert str(file) in caught.value.what
    assert caught.value.remedy
