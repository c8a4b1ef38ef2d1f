"""``--dry-run``: it writes nothing, waits for nobody, and says what the build then does."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support import small_build
from support.namespaces import with_mounts
from support.repositories import CHECKOUT, ensure_triton
from support.small_fixtures import workspace_in
from support.thin_builds import fill_cache
from vllm_env.base.errors import VllmEnvError
from vllm_env.base.locks import locked
from vllm_env.base.network import Network
from vllm_env.interpreter.find import find_interpreter
from vllm_env.sketch import PROVISIONED
from vllm_env.triton.provision import to_be_provisioned
from vllm_env.triton.root import open_root

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.small_fixtures import Channel

_UNKNOWN = "known after the build"


def _state(folder: Path) -> dict[str, tuple[object, ...]]:
    """All that a write changes: names, contents' sizes, and when content or owner were last changed."""
    found: dict[str, tuple[object, ...]] = {}
    for path in [folder, *folder.rglob("*")] if folder.exists() else []:
        status = path.lstat()
        found[str(path)] = (status.st_mode, status.st_uid, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return found


def _shown(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    if done.stdout.startswith("{"):
        return dict(json.loads(done.stdout))
    return dict(line.split(maxsplit=1) for line in done.stdout.splitlines())


@contextlib.contextmanager
def _nothing_written(*folders: Path) -> Iterator[None]:
    before = [_state(folder) for folder in folders]
    yield
    after = [_state(folder) for folder in folders]
    changed = {path for old, new in zip(before, after, strict=True) for path, _ in old.items() ^ new.items()}
    assert changed == set()


@pytest.fixture
def small_cache(thin_channel: Path, thin_wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that knows an interpreter, so that no other one is chosen; builds with it take the stand-ins."""
    monkeypatch.setenv("PIP_FIND_LINKS", str(thin_wheels))
    fill_cache(thin_channel, tmp_path / "cache")
    return tmp_path / "cache"


@pytest.mark.parametrize("output", ["--json", "--verbose"])
def test_a_fresh_clone_stays_as_it_is(output: str, tmp_path: Path) -> None:
    """Without a Triton, a cache or a home: the rules of the pinned Triton are known, and all else is as before."""
    clone, temporary = tmp_path / "clone", tmp_path / "temporary"
    temporary.mkdir()
    shutil.copytree(CHECKOUT, clone, ignore=shutil.ignore_patterns(".git", ".tools", ".triton", "__pycache__", "vllm_env.tar.gz"))
    git: list[str | Path] = ["git", "-C", clone]
    for command in (["init", "--quiet"], ["add", "."]):
        subprocess.run([*git, *command], check=True)
    variables = {**os.environ, "HOME": str(tmp_path / "home"), "PYTHONPATH": str(clone / "env"), "TMPDIR": str(temporary)}
    variables["PYTHONDONTWRITEBYTECODE"] = "1"  # as the bootstrap has it
    for name in ("XDG_CACHE_HOME", "VLLM_ENV_CACHE", "UV_CACHE_DIR", "PIP_CACHE_DIR"):
        variables.pop(name, None)
    command = [sys.executable, "-m", "vllm_env", "--profile", "cpu", "--no-smoke-run", "--dry-run", output]
    status = [*git, "--no-optional-locks", "status", "--porcelain", "--ignored"]
    before = subprocess.check_output(status)
    with _nothing_written(clone, tmp_path / "home"):
        done = subprocess.run(command, env=variables, cwd=clone, capture_output=True, text=True, check=False, timeout=300)
    assert subprocess.check_output(status) == before
    assert list(temporary.iterdir()) == []
    shown = _shown(done)
    assert shown["triton"] == f"24.10 in {clone}/.triton, to be provisioned"
    assert shown["stub"].startswith(f"prebuilt, {clone}/.triton/python_backend_stubs/3.")
    assert int(shown["wheels"]) > 100
    assert shown["key"] == _UNKNOWN


def test_it_says_what_the_build_then_does(small_cache: Path, small_wheel: Path, tmp_path: Path) -> None:
    """A new lock is resolved for it, and written by the build alone; versions, files, stub, layout and key are the build's."""
    models, home = tmp_path / "models", tmp_path / "home"
    spec = small_build.make_spec(tmp_path / "spec", small_wheel)
    run = functools.partial(small_build.build, small_cache, models, "--spec", spec, "--layout", "parts", "--with", "pluggy")
    with _nothing_written(small_cache, spec.parent, home, models):
        plans = [_shown(run("--dry-run", *options, HOME=str(home))) for options in ([], ["--json"])]
    manifest = _shown(run("--json"))["manifest"]
    components = json.loads((models / "vllm/vllm_env.cdx.json").read_text())["components"]
    wheels = [component for component in components if component.get("purl", "").startswith("pkg:pypi/")]
    with _nothing_written(small_cache, spec.parent, models):
        plans.append(_shown(run("--dry-run", "--json", "--locked")))
    for plan in plans:
        assert plan["vllm"].startswith("vllm @ ")
        assert plan["python"] == manifest["python"]
        assert int(plan["wheels"]) == len(wheels)
        assert plan["stub"].startswith(f"{manifest['stub']['origin']}, ")
        assert plan["layout"] == manifest["layout"]
        assert plan["key"] == manifest["key"]
    assert plans[1]["bytes_to_fetch"] > 0
    assert plans[0]["fetch"] == f"{plans[1]['bytes_to_fetch'] / 1e6:.0f} MB of wheels"
    assert plans[2]["bytes_to_fetch"] == 0


def test_a_source_trees_wheel_is_known_after_the_build(
    small_cache: Path, channel: Channel, small_tree: Path, tmp_path: Path
) -> None:
    """None is built for it; when the cache has one, it is read there, and named where it is, with its size."""
    # the stand-in of an interpreter cannot build a wheel
    shutil.rmtree(small_cache / "conda")
    shutil.copytree(channel.root / "conda" / "channel", small_cache / "conda" / "channel")
    tree = tmp_path / "tree"
    shutil.copytree(small_tree, tree, symlinks=True)
    spec = small_build.make_spec(tmp_path / "spec", tree)
    run = functools.partial(small_build.build, small_cache, tmp_path / "models", "--spec", spec)
    with _nothing_written(small_cache, spec.parent, tree):
        shown = _shown(run("--dry-run", "--json"))
    unknown = ("vllm", "conda_channel", "wheels", "key")
    assert {shown[name] for name in unknown} == {_UNKNOWN}
    assert shown["pin"] == f"--vllm-source {tree}"
    assert shown["vllm_wheel"] == f"to be built from {tree}"
    with _nothing_written(tree):
        key = _shown(run("--json"))["manifest"]["key"]
    with _nothing_written(small_cache, spec.parent, tree):
        shown = _shown(run("--dry-run", "--json"))
    assert shown["key"] == key
    (wheel,) = small_cache.glob("wheels/*/*.whl")
    assert shown["vllm"].startswith(f"vllm @ {wheel.parent.as_uri()}/")
    assert shown["vllm_wheel"] == f"in the cache, {wheel.stat().st_size} bytes"


def test_a_commit_that_does_not_exist_is_an_error(small_cache: Path, small_tree: Path, tmp_path: Path) -> None:
    """Of the real command: status 1, and the places that were asked; one that exists is told with its wheel."""
    (tmp_path / "index").mkdir()
    options = ["--wheel-index", (tmp_path / "index").as_uri(), "--git-url", small_tree.as_uri(), "--dry-run", "--json"]
    run = functools.partial(small_build.build, small_cache, tmp_path / "models", *options, "--vllm-commit")
    with _nothing_written(small_cache):
        done = run("f" * 40)
        built = _shown(run(small_build.head(small_tree)))
    assert done.returncode == 1
    assert f"--vllm-commit {'f' * 40}: there is no such commit" in done.stderr
    assert built["vllm_wheel"].startswith(f"to be built from {small_tree.as_uri()}")
    assert built["key"] == _UNKNOWN


def test_another_build_does_not_stop_it(small_cache: Path, small_wheel: Path, tmp_path: Path) -> None:
    """It takes no lock of the cache, as ``clean --dry-run`` does not, and leaves what killed builds have left."""
    spec = small_build.make_spec(tmp_path / "spec", small_wheel)
    (small_cache / "build/vllm_env-abcd_123").mkdir(parents=True)
    run = functools.partial(small_build.build, small_cache, tmp_path / "models")
    with locked(small_cache / "build.lock", lambda: None), _nothing_written(small_cache, spec.parent):
        assert _shown(run("--spec", spec, "--dry-run"))["wheels"] == "3"
        environment = small_build.environment(small_cache)
        command = [sys.executable, "-m", "vllm_env", "clean", "--dry-run", "--json"]
        cleaned = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    assert str(small_cache / "build/vllm_env-abcd_123") in json.loads(cleaned.stdout)["paths"]


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_a_cache_that_cannot_be_written_is_read(python: str, small_cache: Path, small_wheel: Path, tmp_path: Path) -> None:
    """A package of another interpreter is made elsewhere, next to those of the cache."""
    try:
        find_interpreter(python)
    except VllmEnvError as missing:
        pytest.skip(missing.what)
    spec = small_build.make_spec(tmp_path / "spec", small_wheel)
    bound = with_mounts((small_cache, small_cache))
    read_only = [*bound, "sh", "-ec", 'mount -o remount,bind,ro "$0" && exec "$@"', str(small_cache)]
    command = small_build.command(tmp_path / "models", "--spec", spec, "--python", python, "--dry-run", "--json")
    done = subprocess.run(
        [*read_only, *command],
        env=small_build.environment(small_cache, VLLM_ENV_CONDA_CHANNEL="file:///nonexistent"),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert _shown(done)["python"].startswith(f"{python}.")


def test_the_triton_that_is_not_there_yet_is_as_the_wheel_has_it(tmp_path: Path) -> None:
    """Release, rules and stubs of the pinned wheel are written down; what is laid out of it must have the same."""
    ensure_triton()
    if not PROVISIONED.is_dir():
        pytest.skip("this machine has a Triton, and none is provisioned")
    assert to_be_provisioned(workspace_in(tmp_path, Network()), PROVISIONED) == open_root(PROVISIONED)
