"""The sketch of a build: what is read of this machine, and what is refused before the long work."""

from __future__ import annotations

import errno
import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support import triton_folder
from vllm_env import sketch as module
from vllm_env.base.errors import UsageError, VllmEnvError
from vllm_env.layout.layouts import LAYOUTS
from vllm_env.lock.spec import Overrides
from vllm_env.sketch import BuildRequest, choose_profile, find_triton, installed_triton, make_sketch
from vllm_env.triton.root import open_root

if TYPE_CHECKING:
    from vllm_env.base.workspace import Workspace


def _places(monkeypatch: pytest.MonkeyPatch, folder: Path, *, container: bool, provisioned: bool) -> tuple[Path, Path]:
    """Put a Triton where the container has it, and where this tool provisions one; return both places."""
    places = folder / "opt", folder / "place" / ".triton"
    for place, wanted in zip(places, (container, provisioned), strict=True):
        if wanted:
            triton_folder.make_root(place)
    monkeypatch.setattr(module, "CONTAINER_ROOT", places[0])
    monkeypatch.setattr(module, "PROVISIONED", places[1])
    return places


@pytest.mark.parametrize(
    ("container", "provisioned", "found"), [(True, True, 0), (True, False, 0), (False, True, 1), (False, False, None)]
)
def test_the_containers_triton_is_taken_before_the_provisioned_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, container: bool, provisioned: bool, found: int | None
) -> None:
    """Where there is none, none is made to answer the question."""
    places = _places(monkeypatch, tmp_path, container=container, provisioned=provisioned)
    assert installed_triton() == (None if found is None else places[found])


def test_the_default_profile_is_cuda_in_a_container_with_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And cpu everywhere else: another Triton here is provisioned, which knows no GPU."""
    container, provisioned = _places(monkeypatch, tmp_path, container=True, provisioned=True)
    roots = [container, provisioned, None]
    monkeypatch.setattr(module, "has_gpu", lambda: True)
    assert [choose_profile(None, root, Overrides()) for root in roots] == ["cuda", "cpu", "cpu"]
    monkeypatch.setattr(module, "has_gpu", lambda: False)
    assert [choose_profile(None, root, Overrides()) for root in roots] == ["cpu", "cpu", "cpu"]


def test_what_the_user_names_goes_before_the_default_profile(tmp_path: Path) -> None:
    """First --profile, then the only profile of the spec, then --cuda."""
    spec, older = tmp_path / "spec.toml", Overrides(torch_backend="cu129")
    spec.write_text('[profile.cpu]\nvllm = "0.32.0"\n')
    assert choose_profile("cuda", None, Overrides(), spec) == "cuda"
    assert choose_profile(None, None, older, spec) == "cpu"
    spec.write_text('[profile.cpu]\nvllm = "0.32.0"\n[profile.cuda]\nvllm = "0.32.0"\n')
    assert [choose_profile(None, None, overrides, spec) for overrides in (older, Overrides())] == ["cuda", "cpu"]


def test_a_named_triton_wins(workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--triton-root in a container; without it the container's own, and else the provisioned one."""
    container, provisioned = _places(monkeypatch, tmp_path, container=True, provisioned=True)
    named = triton_folder.make_root(tmp_path / "named")
    assert find_triton(workspace, named).path == named
    assert find_triton(workspace, None).path == container
    (container / "bin" / "tritonserver").unlink()
    assert find_triton(workspace, None).path == provisioned


def _release_plan(planned: BuildRequest, release: str, **changes: Any) -> BuildRequest:
    overrides = Overrides(python="3.12", triton_release=release)
    return replace(planned, **{"triton_root": None, "overrides": overrides, **changes})


@pytest.mark.parametrize(
    ("release", "said", "remedy"),
    [
        ("26.13", "--triton-release 26.13 is not a release of Triton", "such as 26.07"),
        ("25.99", "--triton-release 25.99 is not a release of Triton", "such as 26.07"),
        ("26.7", "--triton-release 26.7 is not a release of Triton", "such as 26.07"),
        ("latest", "--triton-release latest is not a release of Triton", "such as 26.07"),
        ("24.10", "--triton-release 24.10: the option is for releases since 24.11", "tritonserver:24.10-py3"),
        ("23.04", "--triton-release 23.04: the option is for releases since 24.11", "tritonserver:23.04-py3"),
    ],
)
def test_a_release_that_cannot_be_built_for_is_refused(
    workspace: Workspace,
    planned: BuildRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    release: str,
    said: str,
    remedy: str,
) -> None:
    """One that does not exist, and one whose own stub is for another Python; also next to a provisioned Triton."""
    _places(monkeypatch, tmp_path, container=False, provisioned=True)
    with pytest.raises(UsageError, match=said) as caught:
        make_sketch(workspace, _release_plan(planned, release))
    assert remedy in caught.value.remedy
    assert not workspace.cache.root.exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"overrides": Overrides(triton_release="26.07")}, r"has Python 3\.11, and the server's own stub is for 3\.12"),
        ({"warm": True}, "--warm: with --triton-release, Triton 26.07 is not on this machine"),
        ({"smoke_again": True}, "--smoke-run: with"),
        ({"smoke_model": "gpt2"}, "--smoke-model: with"),
        ({"stub": "source"}, "--stub source: with"),
    ],
)
def test_what_needs_the_triton_itself_is_refused_with_its_release(
    workspace: Workspace,
    planned: BuildRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    said: str,
) -> None:
    """Another Python than that of its stub, too; the message names the container."""
    _places(monkeypatch, tmp_path, container=False, provisioned=False)
    with pytest.raises(UsageError, match=said) as caught:
        make_sketch(workspace, _release_plan(planned, "26.07", **change))
    assert "nvcr.io/nvidia/tritonserver:26.07-py3" in caught.value.remedy


def test_a_container_of_the_release_is_taken_and_another_refused(
    workspace: Workspace, planned: BuildRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stub is here, so the build is as without the option. A named root counts in the same way."""
    container, _ = _places(monkeypatch, tmp_path, container=True, provisioned=False)
    request = _release_plan(planned, "24.10", overrides=Overrides(triton_release="24.10"))
    assert make_sketch(workspace, request).triton == open_root(container)
    other = _release_plan(planned, "26.07")
    for root in (None, planned.triton_root):
        with pytest.raises(UsageError, match=r"--triton-release 26\.07: the Triton in .* is of release 24\.10"):
            make_sketch(workspace, replace(other, triton_root=root))


def test_a_count_that_cannot_be_written_is_refused(
    workspace: Workspace, planned: BuildRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's file stays as it is."""
    config = planned.model_folder / "config.pbtxt"
    config.parent.mkdir(parents=True)
    config.write_text(text := 'backend: "python" instance_group [{ count: 1 }, { count: 1 }]')
    with pytest.raises(VllmEnvError, match="has 2 instance groups"):
        make_sketch(workspace, replace(planned, count=2))
    assert config.read_text() == text


def test_a_stub_that_is_missing_is_told_before_the_lock(workspace: Workspace, planned: BuildRequest) -> None:
    """--stub prebuilt with a Python for which the Triton has none: a lock may take minutes to resolve."""
    request = replace(planned, stub="prebuilt", overrides=Overrides(python="3.12"))
    with pytest.raises(VllmEnvError, match=r"--python 3\.12: .* has no stub for it") as caught:
        make_sketch(workspace, request)
    assert "3.11" in caught.value.cause


def test_warming_for_a_gpu_needs_one(workspace: Workspace, planned: BuildRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM compiles is for the very GPU; a build without --warm may run anywhere."""
    monkeypatch.setattr(module, "has_gpu", lambda: False)
    with pytest.raises(VllmEnvError, match="--warm: this machine has no GPU") as caught:
        make_sketch(workspace, replace(planned, profile="cuda", warm=True))
    assert "--gpus all" in caught.value.remedy


@pytest.mark.parametrize(
    ("options", "named"), [({"smoke_again": True}, "--smoke-run"), ({"smoke_model": "opt"}, "--smoke-model")]
)
def test_a_smoke_run_that_was_asked_for_needs_its_gpu_before_any_work(
    workspace: Workspace, planned: BuildRequest, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], named: str
) -> None:
    """Not even a Triton is fetched."""
    monkeypatch.setattr(module, "has_gpu", lambda: False)
    monkeypatch.setattr(module, "find_triton", lambda *_: pytest.fail("a Triton is looked for"))
    with pytest.raises(VllmEnvError, match=f"{named}: this machine has no GPU") as caught:
        make_sketch(workspace, replace(planned, profile="cuda", smoke=True, **options))
    assert f"omit {named}" in caught.value.remedy


@pytest.mark.parametrize(("profile", "gpu", "unserved"), [("cuda", False, "no GPU"), ("cuda", True, ""), ("cpu", False, "")])
def test_a_machine_without_a_gpu_builds_for_one_and_does_not_serve(
    workspace: Workspace, planned: BuildRequest, monkeypatch: pytest.MonkeyPatch, profile: str, gpu: bool, unserved: str
) -> None:
    """So its /tmp may be small and its loopback interface down. Nothing is unserved that was not to be served."""
    monkeypatch.setattr(module, "has_gpu", lambda: gpu)
    checked: list[str] = []
    monkeypatch.setattr(module, "check_server", lambda request, profile: checked.append(profile) if request.smoke else None)
    request = replace(planned, profile=profile, smoke=True)
    assert make_sketch(workspace, request).unserved == unserved
    assert checked == ([] if unserved else [profile])
    assert make_sketch(workspace, replace(request, smoke=False)).unserved == ""


@pytest.mark.parametrize(
    ("smoke", "warm", "purpose"),
    [(True, False, "the smoke run"), (True, True, "the smoke run"), (False, True, "--warm")],
)
def test_space_for_tritons_extraction_is_asked_for_first(
    workspace: Workspace, planned: BuildRequest, monkeypatch: pytest.MonkeyPatch, smoke: bool, warm: bool, purpose: str
) -> None:
    """In /tmp, whatever TMPDIR is; the message names what needs it and the ways out."""
    monkeypatch.setattr("vllm_env.layout.archive.EXTRACTED_SPACE", {"cpu": 10**18})
    with pytest.raises(VllmEnvError, match=f"Triton's extraction for {purpose} needs 1000000000.0 GB in /tmp") as caught:
        make_sketch(workspace, replace(planned, layout=LAYOUTS["archive"], smoke=smoke, warm=warm))
    assert "--layout parts" in caught.value.remedy
    assert "--no-smoke-run" in caught.value.remedy


def test_a_name_that_triton_mistakes_is_refused(workspace: Workspace, planned: BuildRequest, tmp_path: Path) -> None:
    """Up to 25.07 it is a word of bash, without quotes."""
    with pytest.raises(UsageError, match=r"--model 'my model': Triton 24\.10 cannot serve") as caught:
        make_sketch(workspace, replace(planned, model="my model"))
    assert "without quotes" in caught.value.cause
    (tmp_path / "triton" / "RELEASE").write_text("25.08\n")
    make_sketch(workspace, replace(planned, model="my model"))


@pytest.mark.parametrize("smoke", [True, False])
def test_an_unpacked_environment_in_a_path_that_triton_mistakes_is_refused(
    workspace: Workspace, planned: BuildRequest, tmp_path: Path, smoke: bool
) -> None:
    """If it would be served there. Triton resolves links, so none helps; the other layouts are extracted to /tmp."""
    (tmp_path / "with space").mkdir()
    (tmp_path / "link").symlink_to("with space")
    request = replace(planned, repository=tmp_path / "link" / "models", layout=LAYOUTS["directory"], smoke=smoke)
    if smoke:
        with pytest.raises(VllmEnvError, match=r"cannot use an environment in .*/with space/models/vllm") as caught:
            make_sketch(workspace, request)
        assert "--layout parts" in caught.value.remedy
    for passing in (replace(request, smoke=False), replace(request, layout=LAYOUTS["parts"])):
        make_sketch(workspace, passing)


def test_a_loopback_interface_that_is_down_is_told_before_the_build(
    workspace: Workspace, planned: BuildRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smoke run would fail minutes later, inside of gloo."""

    def unreachable(*_: object) -> None:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    with pytest.raises(VllmEnvError, match=r"on 127\.0\.0\.1: Network is unreachable") as caught:
        make_sketch(workspace, replace(planned, smoke=True))
    assert "ip link set lo up" in caught.value.remedy
    make_sketch(workspace, replace(planned, smoke=False))


def test_a_model_of_the_official_backend_is_refused(
    workspace: Workspace, planned: BuildRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would be placed beside its configuration would not be served; the message names adopt."""
    model = planned.model_folder
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text('backend: "vllm"')
    (model / "1" / "model.json").write_text("{}")
    with pytest.raises(VllmEnvError, match='names the backend "vllm"') as caught:
        make_sketch(workspace, planned)
    assert "adopt" in caught.value.remedy


def test_a_repository_that_cannot_be_written_is_refused_first(
    workspace: Workspace, planned: BuildRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a Triton is even looked for."""
    monkeypatch.setattr(module, "find_triton", lambda *_: pytest.fail("a Triton is looked for"))
    (tmp_path / "file").touch()
    with pytest.raises(VllmEnvError, match="is not a folder"):
        make_sketch(workspace, replace(planned, repository=tmp_path / "file"))
