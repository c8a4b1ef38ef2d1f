"""From a lock to a prefix: real uv, py-rattler and compiler of bytecode, on the small vLLM."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from support import small_build
from support.elf_files import make_library
from support.small_fixtures import workspace_in
from support.wheels import write_wheel
from vllm_env.base.errors import CommandError, VllmEnvError
from vllm_env.base.machine import EPOCH
from vllm_env.base.network import Network, read_pip_config
from vllm_env.lock.lock import LockOptions, make_lock
from vllm_env.lock.spec import Overrides, load_spec
from vllm_env.prefix import machine_libraries
from vllm_env.prefix.needed_libraries import find_needed_libraries
from vllm_env.prefix.prefix import make_prefix, prefix_key
from vllm_env.triton.root import rules_of

if TYPE_CHECKING:
    from pathlib import Path

    from support.small_fixtures import Channel
    from vllm_env.base.workspace import Workspace
    from vllm_env.lock.pylock import Lock, LockedWheel
    from vllm_env.prefix.prefix import Prefix


@pytest.fixture(scope="module")
def workspace(channel: Channel, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A cache with the interpreter's channel, and the registries that pip is configured with."""
    root = tmp_path_factory.mktemp("cache")
    shutil.copytree(channel.root / "conda/channel", root / "conda/channel")
    return workspace_in(root, Network(read_pip_config()))


@pytest.fixture(scope="module")
def lock(workspace: Workspace, small_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Lock:
    """The lock of the small vLLM."""
    file = small_build.make_spec(tmp_path_factory.mktemp("spec"), small_wheel)
    spec = load_spec("cpu", Overrides(), file)
    return make_lock(workspace, spec, rules_of("24.10"), LockOptions())


@pytest.fixture(scope="module")
def prefix(workspace: Workspace, lock: Lock) -> Prefix:
    """Its prefix."""
    return make_prefix(workspace, lock)


def test_the_prefix_holds_what_the_lock_says(prefix: Prefix, lock: Lock) -> None:
    """Every wheel of the lock and nothing else is installed, in the locked version."""
    code = "import importlib.metadata as m, json; print(json.dumps({d.name.lower(): d.version for d in m.distributions()}))"
    installed = json.loads(subprocess.check_output([prefix.python, "-c", code]))
    assert installed == lock.versions()
    assert installed["vllm"] == small_build.VERSION


def test_every_source_has_bytecode_that_the_interpreter_accepts(prefix: Prefix) -> None:
    """Nothing is compiled at run time: the modules come from their .pyc, whose times fit."""
    code = "import numpy, vllm, json, sys; print(numpy.__cached__)"
    answer = subprocess.run([prefix.python, "-v", "-c", code], capture_output=True, text=True, check=True)
    # -v names each .pyc that was accepted ("matches") and each one that was written
    assert "# wrote" not in answer.stderr
    assert "bytecode is stale" not in answer.stderr
    assert f"matches {prefix.path}/lib/python3.11/site-packages/numpy/__init__.py" in answer.stderr


def test_no_file_names_the_folder_of_the_build(prefix: Prefix, workspace: Workspace) -> None:
    """Scripts, bytecode and metadata are free of the staging folder and of the cache."""
    place = str(workspace.cache.root)
    found = subprocess.run(["grep", "-rlF", place, prefix.path], capture_output=True, text=True, check=False)
    assert found.stdout == ""


def test_scripts_start_at_any_place(prefix: Prefix, tmp_path: Path) -> None:
    """An entry point runs through the moved environment's own interpreter."""
    subprocess.run(["cp", "-r", prefix.path, tmp_path / "moved"], check=True)
    assert subprocess.check_output([tmp_path / "moved/bin/vllm"], text=True).strip() == small_build.VERSION


def test_all_times_are_the_epoch(prefix: Prefix) -> None:
    """Bytecode stays valid because its source's time is the one that Triton restores."""
    files = [p for p in prefix.path.rglob("*.py*") if p.is_file()]
    assert files
    assert {p.stat().st_mtime for p in files} == {EPOCH}


def test_a_wheel_that_is_not_the_locks_is_refused(workspace: Workspace, lock: Lock) -> None:
    """A file with another digest is not installed, and nothing of the attempt stays."""
    changed = _with(lock, replace(lock.wheels[0], sha256="0" * 64))
    prefixes = workspace.cache.path("prefixes")
    before = {p.name for p in prefixes.glob("*")}
    with pytest.raises(CommandError, match=f"No index has the locked file {lock.wheels[0].file}"):
        make_prefix(workspace, changed)
    assert {p.name for p in prefixes.glob("*")} == before
    assert list(workspace.cache.path("build").iterdir()) == []


def _with(lock: Lock, changed: LockedWheel) -> Lock:
    """The lock with another record of one of its wheels."""
    return replace(lock, wheels=tuple(changed if w.name == changed.name else w for w in lock.wheels))


def test_two_packages_that_own_one_file_are_refused_before_anything_is_packed(
    workspace: Workspace, lock: Lock, tmp_path: Path
) -> None:
    """Which of the two wins is chance: both are named, with the constraint that helps; nothing is left in the cache."""
    one = write_wheel(tmp_path, "cuda_python", "12.6.2", {"cuda/runtime.py": b"old = 1\n", "cuda/same.py": b""})
    other = write_wheel(tmp_path, "cuda_bindings", "13.5.0", {"cuda/runtime.py": b"new = 1\n", "cuda/same.py": b""})
    clashing = replace(lock, wheels=(one, other))
    with pytest.raises(VllmEnvError, match=r"cuda-bindings 13\.5\.0 and cuda-python 12\.6\.2 own 1 file") as caught:
        make_prefix(workspace, clashing)
    assert "--with 'cuda-python>=13'" in caught.value.remedy
    assert not workspace.cache.path("prefixes", prefix_key(clashing, ())).exists()


def test_a_library_of_this_machine_that_a_wheel_needs_is_packed(
    workspace: Workspace,
    lock: Lock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As vLLM's kernels need libnuma.so.1, which no wheel brings and a bare container lacks."""
    needed = make_library(tmp_path / "machine", "libonlyhere.so.1")
    module = make_library(tmp_path / "build", "extension.so", symbol="other", needs=(needed,), uses="answer")
    wheel = write_wheel(tmp_path, "extension", "1.0", {"extension.so": module.read_bytes()})
    complete = replace(lock, wheels=(wheel,))
    found = machine_libraries.find_library
    places = {"libonlyhere.so.1": needed}
    monkeypatch.setattr(machine_libraries, "find_library", lambda name, *rest: places.get(name) or found(name, *rest))
    prefix = make_prefix(workspace, complete)
    assert (prefix.path / "lib" / "libonlyhere.so.1").is_file()
    assert find_needed_libraries(prefix.path, "cpu").missing == ()
    packed = prefix.path / "lib" / f"python{lock.spec.python}" / "site-packages" / "extension.so"
    ask = f"import ctypes; print(ctypes.CDLL({str(packed)!r}).calls_answer())"
    bare = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}  # as vLLM's processes are started
    answer = subprocess.run([prefix.python, "-I", "-c", ask], capture_output=True, text=True, check=False, env=bare)
    assert answer.stdout == "42\n", answer.stderr
    assert "libonlyhere.so.1, which the environment needs and a bare container lacks" in capsys.readouterr().err
