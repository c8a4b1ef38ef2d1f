"""A build whose long stages are stood in for, and a plan whose lock is known."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support import triton_folder
from support.build_stages import Stages
from support.small_build import small_lock
from support.small_fixtures import workspace_in
from vllm_env import build as module
from vllm_env import plan, smoke_stage
from vllm_env.base.workspace import TEMPLATE
from vllm_env.layout.directory import Directory
from vllm_env.layout.layouts import LAYOUTS
from vllm_env.publish.publish import publish
from vllm_env.sketch import BuildRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_env.base.workspace import Workspace
    from vllm_env.layout.layout import Packed
    from vllm_env.lock.pylock import Lock
    from vllm_env.lock.spec import Spec


_SPEC = """\
[profile.cpu]
vllm = "0.99.0"
python = "3.11"
[profile.cuda]
vllm = "0.99.0"
python = "3.11"
"""


@pytest.fixture(autouse=True)
def plenty_of_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file system has 1 TB free, whatever this machine has; a test of a full one says so itself."""
    usage = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=10**12))


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stages:
    """Stages that end well."""
    made = Stages(tmp_path)
    for name in ("make_sketch", "resolve", "make_prefix", "make_stub", "opened", "verify_tree"):
        monkeypatch.setattr(module, name, getattr(made, name))
    monkeypatch.setattr("vllm_env.layout.archive.Archive.pack", lambda _layout, *arguments: made.pack(*arguments))
    unpacked = Directory.pack

    def pack_directory(*arguments: Any) -> Packed:
        try:
            return unpacked(*arguments)
        finally:
            made.has_packed.set()

    monkeypatch.setattr(Directory, "pack", pack_directory)
    monkeypatch.setattr(module, "warm", made.warm)
    for name in ("has_prefix", "ensure_standin", "is_fetchable", "smoke_run"):
        monkeypatch.setattr(smoke_stage, name, getattr(made, name))
    real = publish

    def observed(*arguments: object) -> Path:
        made._call("publish")
        return real(*arguments)

    monkeypatch.setattr(module, "publish", observed)
    return made


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """An empty cache, no network."""
    return workspace_in(tmp_path / "cache")


@pytest.fixture(scope="session")
def small_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's folder with three files of its code: each build copies and hashes all of it."""
    folder = tmp_path_factory.mktemp("template") / "vllm"
    code = ("model.py", "node.py", "triton_vllm/__init__.py", "triton_vllm/request/contract.py")
    for name in ("config.pbtxt", "vllm_engine_args.example.json", *(f"1/{file}" for file in code)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(TEMPLATE / name, folder / name)
    return folder


@pytest.fixture
def request_(tmp_path: Path, small_template: Path) -> BuildRequest:
    """A build with its smoke run, of the layout that `Stages` packs."""
    return BuildRequest(layout=LAYOUTS["archive"], repository=tmp_path / "models", template=small_template)


@pytest.fixture
def planned(tmp_path: Path) -> BuildRequest:
    """A build of both profiles for a Triton that has a stub; nothing of it is served."""
    (tmp_path / "spec.toml").write_text(_SPEC)
    root = triton_folder.make_root(tmp_path / "triton")
    place = tmp_path / "models"
    return BuildRequest("cpu", spec_file=tmp_path / "spec.toml", triton_root=root, repository=place, smoke=False)


@pytest.fixture
def lock(monkeypatch: pytest.MonkeyPatch) -> Lock:
    """What every spec resolves to."""
    lock = small_lock()

    def resolved(_workspace: Workspace, spec: Spec, *_: object) -> Lock:
        return replace(lock, spec=spec)

    monkeypatch.setattr(plan, "make_lock", resolved)
    return lock


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A folder on another file system."""
    here = tmp_path.stat().st_dev
    others = [p for p in (Path("/dev/shm"), Path("/tmp")) if os.access(p, os.W_OK) and p.stat().st_dev != here]
    if not others:
        pytest.skip("there is no other file system here")
    folder = Path(tempfile.mkdtemp(prefix="vllm_env_test_", dir=others[0]))
    yield folder
    shutil.rmtree(folder)
