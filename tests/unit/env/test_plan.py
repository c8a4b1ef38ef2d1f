"""The plan: what a build will use, and the key of what it will publish."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support import triton_folder
from vllm_env import plan, sketch
from vllm_env.base.network import Network
from vllm_env.layout.layouts import LAYOUTS
from vllm_env.lock.spec import Overrides
from vllm_env.plan import Plan, resolve
from vllm_env.sketch import BuildRequest, make_sketch
from vllm_env.triton.root import NEWEST_KNOWN, open_root, rules_of
from vllm_env.triton.stub_source import StubOptions

if TYPE_CHECKING:
    from vllm_env.base.workspace import Workspace
    from vllm_env.lock.pylock import Lock


def make_plan(workspace: Workspace, request: BuildRequest) -> Plan:
    return resolve(workspace, make_sketch(workspace, request))


@pytest.mark.usefixtures("lock")
def test_a_triton_is_provisioned_where_there_is_none(
    workspace: Workspace,
    planned: BuildRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As a stage of its own that says what it has made and where; the next plan finds it."""
    place = tmp_path / "place" / ".triton"
    for module in (sketch, plan):
        monkeypatch.setattr(module, "PROVISIONED", place)
    monkeypatch.setattr(sketch, "CONTAINER_ROOT", tmp_path / "opt")
    monkeypatch.setattr(plan, "provision", lambda _workspace, target: triton_folder.make_root(target))
    online = replace(workspace, network=Network())
    request = replace(planned, triton_root=None)
    outline = make_sketch(online, request)
    assert (outline.triton.path, outline.triton.release, place.exists()) == (place, "24.10", False)
    assert resolve(online, outline).triton == open_root(place)
    first, last, *_ = capsys.readouterr().err.splitlines()
    assert first == "triton …"
    assert last.endswith(f"a CPU Triton 24.10 in {place}")
    assert make_plan(online, request).triton.path == place
    assert "triton" not in capsys.readouterr().err


def test_a_build_for_a_triton_elsewhere_needs_none_here(
    workspace: Workspace, planned: BuildRequest, lock: Lock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rules come from the release, no stub is planned, and nothing is provisioned or served."""
    monkeypatch.setattr(sketch, "installed_triton", lambda: None)
    monkeypatch.setattr(plan, "provision", lambda *_: pytest.fail("a Triton is made"))
    layer = replace(lock.conda, packages=(replace(lock.conda.packages[0], version="3.12.1"),))
    monkeypatch.setattr(plan, "make_lock", lambda _workspace, spec, *_: replace(lock, spec=spec, conda=layer))
    elsewhere = replace(planned, triton_root=None, overrides=Overrides(python="3.12", triton_release="26.07"))
    made = make_plan(workspace, replace(elsewhere, smoke=True))
    assert (made.triton.release, made.triton.rules) == ("26.07", rules_of("26.07"))
    assert made.sketch.unserved == "Triton 26.07 is not on this machine"
    assert made.stub.prebuilt is None
    assert made.sketch.spec.triton_release == "26.07"
    other = make_plan(workspace, replace(elsewhere, overrides=Overrides(python="3.12", triton_release="26.06")))
    assert len({made.key, other.key, ""}) == 3
    assert not workspace.cache.root.exists()


@pytest.mark.usefixtures("lock")
def test_a_plan_has_what_a_build_needs(workspace: Workspace, planned: BuildRequest, tmp_path: Path) -> None:
    """The profile's spec with the command line's changes, the Triton, the lock and the stub; nothing is made for it."""
    made = make_plan(workspace, replace(planned, overrides=Overrides(packages=("packaging",))))
    assert (made.sketch.spec.profile, made.sketch.spec.requirements) == ("cpu", ("packaging",))
    assert made.triton == open_root(tmp_path / "triton")
    assert made.lock.spec == made.sketch.spec
    assert made.stub.prebuilt == made.triton.stubs["3.11"]
    assert made.stub.python == "3.11.7"
    assert not workspace.cache.root.exists()
    assert not planned.repository.exists()


def test_the_key_is_that_of_what_would_be_published(
    workspace: Workspace, planned: BuildRequest, lock: Lock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another lock, rule, stub, layout or profile is another set; where it goes and whether it is served is not."""
    key = make_plan(workspace, planned).key
    assert make_plan(workspace, replace(planned, repository=tmp_path / "other", model="mine")).key == key
    others = [
        make_plan(workspace, replace(planned, keep=("tests",))).key,
        make_plan(workspace, replace(planned, layout=LAYOUTS["directory"])).key,
        make_plan(workspace, replace(planned, profile="cuda")).key,
    ]
    stub = open_root(tmp_path / "triton").stubs["3.11"]
    before = stub.read_bytes()
    stub.write_bytes(before + b"another")
    others.append(make_plan(workspace, planned).key)
    stub.write_bytes(before)
    changed = replace(lock, wheels=(*lock.wheels[1:], replace(lock.wheels[0], sha256="9" * 64)))
    monkeypatch.setattr(plan, "make_lock", lambda _workspace, spec, *_: replace(changed, spec=spec))
    others.append(make_plan(workspace, planned).key)
    assert len({key, *others}) == 1 + len(others)


@pytest.mark.usefixtures("lock")
@pytest.mark.parametrize("profile", ["cpu", "cuda"])
def test_the_stub_is_built_for_the_profile(workspace: Workspace, planned: BuildRequest, profile: str) -> None:
    """A stub for cuda shares GPU memory; all other options are those of the command line."""
    options = StubOptions("https://mirror", "", 3)
    made = make_plan(workspace, replace(planned, stub_options=options, profile=profile))
    assert made.stub.options == replace(options, gpu=profile == "cuda")


@pytest.mark.usefixtures("lock")
def test_a_release_that_nobody_has_checked_is_told(
    workspace: Workspace, planned: BuildRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The notes of the checks reach the user."""
    (tmp_path / "triton" / "RELEASE").write_text("39.01\n")
    make_plan(workspace, planned)
    assert f"Triton 39.01 is not in the table of releases, which ends with {NEWEST_KNOWN}" in capsys.readouterr().err
