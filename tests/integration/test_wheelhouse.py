"""The wheelhouse: all that a build downloads and nothing else, each file as the lock has it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.small_build import small_lock
from support.small_fixtures import workspace_in
from vllm_env import wheelhouse as module
from vllm_env.base.errors import VllmEnvError
from vllm_env.base.filesystem import file_sha256
from vllm_env.base.network import Network, NetworkError
from vllm_env.lock.pylock import PYTORCH_INDEX, LockedWheel
from vllm_env.plan import Plan
from vllm_env.sketch import BuildRequest, Sketch
from vllm_env.triton.root import TritonRoot, rules_of
from vllm_env.triton.stub import StubChoice
from vllm_env.triton.stub_source import StubOptions
from vllm_env.wheelhouse import fill_wheelhouse

if TYPE_CHECKING:
    from support.small_fixtures import Channel
    from vllm_env.base.workspace import Workspace

REQUEST = BuildRequest(smoke=False)
"""As the subcommand asks: nothing is served, so no space for a server is needed."""
_TRITON = "nvidia_pytriton-0.7.0-py3-none-manylinux_2_35_x86_64.whl"


@pytest.fixture
def plan(channel: Channel, small_wheel: Path, tmp_path: Path) -> Plan:
    """A lock of one wheel, which lies on this machine, and of this machine's interpreter; its Triton is an own one."""
    lock = small_lock()
    wheel = LockedWheel("vllm", "0.99.0", small_wheel.name, file_sha256(small_wheel), url=small_wheel.as_uri())
    lock = replace(lock, conda=channel.layer, wheels=(wheel,))
    triton = TritonRoot(tmp_path / "triton", "24.10", rules_of("24.10"))
    sketch = Sketch(REQUEST, lock.spec, triton)
    return Plan(sketch, triton, lock, StubChoice(triton, lock.python, StubOptions()), "k")


@pytest.fixture
def asked(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is planned is always this."""
    monkeypatch.setattr(module, "make_sketch", lambda *_: plan.sketch)
    monkeypatch.setattr(module, "resolve", lambda *_: plan)


@pytest.fixture
def workspace(small_cache: Path) -> Workspace:
    """A cache with the interpreter's package, and a network that is not needed: all that is fetched lies here."""
    return workspace_in(small_cache, Network())


@pytest.fixture(autouse=True)
def tools_lock(small_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lock of the packager's own tools: one wheel that lies on this machine, not 150 MB from a registry."""
    lock = tmp_path / "requirements.txt"
    lock.write_text(f"vllm @ {small_wheel.as_uri()} --hash=sha256:{file_sha256(small_wheel)}\n")
    monkeypatch.setattr(module, "TOOLS_LOCK", lock)
    return lock


def _names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.usefixtures("asked")
def test_it_holds_the_locks_files(workspace: Workspace, plan: Plan, small_wheel: Path, tmp_path: Path) -> None:
    """The wheel, and a conda channel with the interpreter's package; no temporary file of pip's stays.

    A second run completes what the first one left.
    """
    folder = tmp_path / "new" / "house"
    lock = fill_wheelhouse(workspace, REQUEST, folder)
    assert lock == plan.lock
    (package,) = lock.conda.packages
    assert {small_wheel.name, f"conda/linux-64/{package.file_name}"} <= {*_names(folder)}
    assert (folder / small_wheel.name).read_bytes() == small_wheel.read_bytes()
    assert file_sha256(folder / "conda" / "linux-64" / package.file_name) == package.sha256
    assert {path.name for path in folder.iterdir()} == {"conda", "tools", small_wheel.name}
    assert [path.name for path in (folder / "tools").iterdir()] == [small_wheel.name]
    assert list(workspace.cache.path("build").iterdir()) == []
    before = _names(folder)
    (folder / small_wheel.name).unlink()
    fill_wheelhouse(workspace, REQUEST, folder)
    assert _names(folder) == before


@pytest.mark.usefixtures("asked")
def test_a_file_that_is_not_the_locks_is_refused(
    workspace: Workspace, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A registry may have another file under the same name; it does not get into the folder."""
    (wheel,) = plan.lock.wheels
    other = replace(plan, lock=replace(plan.lock, wheels=(replace(wheel, sha256="0" * 64),)))
    monkeypatch.setattr(module, "resolve", lambda *_: other)
    with pytest.raises(VllmEnvError, match="download the wheels of the lock"):
        fill_wheelhouse(workspace, REQUEST, tmp_path / "house")
    assert _names(tmp_path / "house") == []


def test_only_torch_is_asked_of_pytorchs_index(
    workspace: Workspace, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock says which wheels only that index has; whatever else it offers is not taken from there."""
    (wheel,) = plan.lock.wheels
    torch = LockedWheel("torch", "2.13.0+cpu", "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl", "5" * 64, index=PYTORCH_INDEX)
    lock = replace(plan.lock, wheels=(torch, wheel), spec=replace(plan.lock.spec, torch_backend="cpu"))
    monkeypatch.setattr(module, "resolve", lambda *_: replace(plan, lock=lock))
    asked: list[tuple[str, str]] = []

    def recorded(_network: Network, arguments: list[object], _what: str, *, torch_backend: str = "", **_options: object) -> str:
        asked.append((Path(str(arguments[-1])).read_text("utf-8"), torch_backend))
        return ""

    monkeypatch.setattr(Network, "pip_command", recorded)
    fill_wheelhouse(workspace, REQUEST, tmp_path / "house")
    assert asked[:2] == [(f"{wheel.requirement}\n", ""), (f"{torch.requirement}\n", "cpu")]
    assert [backend for _, backend in asked[2:]] == [""]


@pytest.mark.usefixtures("asked")
def test_an_installed_wheel_has_its_tools_beside_it(workspace: Workspace, tools_lock: Path, tmp_path: Path) -> None:
    """There is no lock of them in it, and no need."""
    tools_lock.unlink()
    fill_wheelhouse(workspace, REQUEST, tmp_path / "house")
    assert not (tmp_path / "house" / "tools").exists()


@pytest.mark.usefixtures("asked")
def test_offline_is_refused_by_name(small_cache: Path, tmp_path: Path) -> None:
    """What is fetched for a machine without network needs one."""
    workspace = workspace_in(small_cache, Network(offline=True))
    with pytest.raises(NetworkError, match="--offline: cannot download the wheels of the lock"):
        fill_wheelhouse(workspace, REQUEST, tmp_path / "house")


@pytest.mark.usefixtures("asked")
def test_a_triton_that_was_provisioned_goes_along(
    small_cache: Path, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that has none will need its wheel; one with a container's Triton, as in the other tests, does not."""
    (tmp_path / "other house").mkdir()
    (tmp_path / "other house" / _TRITON).write_text("triton")
    workspace = workspace_in(small_cache, Network(wheelhouse=tmp_path / "other house"))
    monkeypatch.setattr(module, "PROVISIONED", plan.triton.path)
    fill_wheelhouse(workspace, REQUEST, tmp_path / "house")
    assert (tmp_path / "house" / _TRITON).is_file()
