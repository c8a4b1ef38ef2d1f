"""The build: its stages in their order, what is reused, and what stands in the repository when one of them fails."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from support.build_stages import Stages, build_all
from support.patience import wait_for
from support.repositories import copied_checkout
from vllm_env import build as module
from vllm_env import smoke_stage
from vllm_env.base.errors import CommandError, VllmEnvError
from vllm_env.base.workspace import TEMPLATE
from vllm_env.build import build
from vllm_env.layout.layouts import LAYOUTS
from vllm_env.publish.adopt import read_adoption, stage_template
from vllm_env.serve.standin import FACTS
from vllm_env.sketch import BuildRequest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from vllm_env.base.workspace import Workspace


_SET = {"triton_python_backend_stub", "stub_lib", "vllm_env.tar.gz", "vllm_env.cdx.json", "vllm_env.json"}


def _staged(workspace: Workspace) -> list[Path]:
    return list(workspace.cache.path("build").glob("*"))


def test_stages_run_in_their_order(stages: Stages, workspace: Workspace, request_: BuildRequest) -> None:
    """What is published has been verified and served before, and was warmed afterwards, where it stands."""
    result = build_all(workspace, replace(request_, warm=True))
    order = ["plan", "prefix", "stub", "archive", "stand-in", "verify", "smoke run", "publish", "warm"]
    assert stages.called == order
    assert (result.rebuilt, result.model) == (True, request_.model_folder)
    assert result.smoke
    assert result.smoke.answers == (("Hello", " there"),)
    assert result.warmed
    assert result.warmed.folder == request_.model_folder / "vllm_cache"
    assert json.loads((result.model / "vllm_env.json").read_text()) == json.loads(result.manifest.to_json())
    assert {path.name for path in result.model.iterdir()} >= {*_SET, "1", "config.pbtxt"}
    assert _staged(workspace) == []


def test_what_is_served_is_what_will_be_published(stages: Stages, workspace: Workspace, request_: BuildRequest) -> None:
    """Under the model's name, from the cache: the set with the code, while the repository is not yet there."""
    build_all(workspace, replace(request_, model="mine"))
    (served,) = stages.served
    assert served.model_folder.name == "mine"
    assert served.model_folder.is_relative_to(workspace.cache.path("build"))
    assert stages.candidates == [{*_SET, "1", "config.pbtxt"}]
    assert served.binary == stages.folder / "triton" / "bin" / "tritonserver"


@pytest.mark.parametrize("stage", ["prefix", "stub", "archive", "verify", "stand-in", "smoke run", "publish"])
@pytest.mark.parametrize("error", [CommandError("No."), KeyboardInterrupt(), OSError(errno.EIO, "Input/output error")], ids=repr)
def test_a_stage_that_fails_changes_nothing(
    stages: Stages, workspace: Workspace, request_: BuildRequest, stage: str, error: BaseException
) -> None:
    """The old set stands as it was, nothing is staged any more, and the next build ends well."""
    model = build_all(workspace, request_).model
    before = {path: path.stat().st_mtime_ns for path in model.rglob("*")}
    stages.key, stages.fails, stages.error = "another", stage, error
    with pytest.raises(type(error)):
        build(workspace, request_)
    # The stand-in's error is told after the checks.
    assert stages.called[-1] == ("verify" if stage == "stand-in" else stage)
    assert {path: path.stat().st_mtime_ns for path in model.rglob("*")} == before
    assert _staged(workspace) == []
    stages.fails = ""
    assert build_all(workspace, request_).manifest.key == "another"


def _cut_off(model: Path) -> None:
    (model / "vllm_env.tar.gz").unlink()  # it is a link to the cache's
    (model / "vllm_env.tar.gz").touch()


def _without_execution(model: Path) -> None:
    (model / "triton_python_backend_stub").chmod(0o644)


@pytest.mark.parametrize(
    "harm",
    [
        pytest.param(lambda model: (model / "vllm_env.tar.gz").unlink(), id="the archive is gone"),
        pytest.param(_cut_off, id="the archive is cut off"),
        pytest.param(lambda model: (model / "triton_python_backend_stub").unlink(), id="the stub is gone"),
        pytest.param(lambda model: (model / "triton_python_backend_stub").write_text("stab"), id="another stub"),
        pytest.param(_without_execution, id="a stub that may not be run"),
        pytest.param(lambda model: shutil.rmtree(model / "stub_lib"), id="without the libraries of the stub, as built before"),
        pytest.param(lambda model: (model / "vllm_env.json").unlink(), id="the manifest is gone"),
        pytest.param(lambda model: (model / "vllm_env.json").write_text("{"), id="the manifest is damaged"),
        pytest.param(lambda model: (model / "vllm_env.json").write_text('{"format": 99}'), id="of another version"),
    ],
)
def test_what_is_not_whole_is_built_again(
    stages: Stages, workspace: Workspace, request_: BuildRequest, harm: Callable[[Path], object]
) -> None:
    """A damaged manifest says "Build it again", and a build must be able to."""
    model = build_all(workspace, request_).model
    harm(model)
    again = build_all(workspace, request_)
    assert again.rebuilt
    assert (model / "vllm_env.tar.gz").read_text() == "k"
    assert os.access(model / "triton_python_backend_stub", os.X_OK)
    assert not build_all(workspace, request_).rebuilt


def test_what_passed_before_is_not_verified_again(
    stages: Stages, workspace: Workspace, request_: BuildRequest, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """On this machine, for another repository; its notes were said the first time."""
    build_all(workspace, request_)
    assert "a note" in capsys.readouterr().err
    build_all(workspace, replace(request_, repository=tmp_path / "other"))
    assert stages.called.count("verify") == 1
    assert "passed before" in capsys.readouterr().err


@pytest.mark.parametrize("layout", ["directory", "archive"])
def test_checks_that_passed_are_not_repeated_if_the_smoke_run_failed(
    stages: Stages, workspace: Workspace, request_: BuildRequest, capsys: pytest.CaptureFixture[str], layout: str
) -> None:
    """Whether the model was served while the environment was checked, or after that. The checks take long."""
    request = replace(request_, layout=LAYOUTS[layout])
    stages.fails = "smoke run"
    with pytest.raises(VllmEnvError, match=r"It failed\."):
        build_all(workspace, request)
    assert not request.model_folder.exists()
    stages.fails = ""
    build_all(workspace, request)
    assert stages.called.count("verify") == 1
    assert "passed before" in capsys.readouterr().err


@pytest.mark.parametrize("layout", ["directory", "archive"])
def test_the_model_is_served_while_its_environment_is_checked(
    stages: Stages, workspace: Workspace, request_: BuildRequest, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """But not one that Triton would unpack once more: that needs the space of the tree that is being checked."""
    is_beside = layout == "directory"

    def verify_tree(*_arguments: Any, at_once: int | None) -> tuple[str, ...]:
        assert (at_once is not None) is is_beside
        if is_beside:
            wait_for(lambda: "smoke run" in stages.called, "the smoke run")
        assert ("smoke run" in stages.called) is is_beside
        return ()

    monkeypatch.setattr(module, "verify_tree", verify_tree)
    assert build_all(workspace, replace(request_, layout=LAYOUTS[layout])).smoke


def test_of_both_the_checks_tell_first(
    stages: Stages, workspace: Workspace, request_: BuildRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they find is closer to the cause than what a server says. The next build checks again."""
    request = replace(request_, layout=LAYOUTS["directory"])

    def verify_tree(*_arguments: Any, at_once: int | None) -> tuple[str, ...]:
        wait_for(lambda: "smoke run" in stages.called, "the smoke run")
        raise VllmEnvError("A library is missing.")

    stages.fails = "smoke run"
    with monkeypatch.context() as patch:
        patch.setattr(module, "verify_tree", verify_tree)
        with pytest.raises(VllmEnvError, match=r"A library is missing\."):
            build_all(workspace, request)
    stages.fails = ""
    build_all(workspace, request)
    assert stages.called.count("verify") == 1


def test_the_standins_answers_are_known_and_a_named_models_are_not(
    stages: Stages, workspace: Workspace, request_: BuildRequest
) -> None:
    """--smoke-model: nobody knows what it says, and no stand-in is made."""
    build_all(workspace, request_)
    assert stages.served[-1].engine_model == str(stages.folder / "standin")
    assert stages.served[-1].expected == dict(FACTS)
    stages.called.clear()
    build_all(workspace, replace(request_, smoke_model="facebook/opt-125m"))
    assert stages.served[-1].engine_model == "facebook/opt-125m"
    assert stages.served[-1].expected == {}
    assert "stand-in" not in stages.called


@pytest.fixture
def template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model's folder as this repository has it, whatever a build has left in this checkout's."""
    folder = copied_checkout(tmp_path / "checkout") / "model_repository" / "vllm"
    for each in (module, smoke_stage):
        monkeypatch.setattr(each, "TEMPLATE", folder)
    return folder


@pytest.mark.parametrize(("hub", "smoke_model", "names"), [(False, "", "standin"), (False, "/mine", ""), (True, "", "")])
def test_where_no_hub_answers_the_standin_is_served_next(
    stages: Stages,
    workspace: Workspace,
    request_: BuildRequest,
    template: Path,
    hub: bool,
    smoke_model: str,
    names: str,
) -> None:
    """After the first build and after one that had nothing to do; a model of the user's is not replaced."""
    stages.hub = hub
    for _ in range(2):
        model = build_all(workspace, replace(request_, smoke_model=smoke_model)).model
        arguments = model / "vllm_engine_args.json"
        assert json.loads(arguments.read_text())["model"] == (names or "facebook/opt-125m")
        shutil.copyfile(arguments.with_suffix(".example.json"), arguments)


@pytest.mark.parametrize("profile", ["cuda", "cpu"])
def test_a_gpu_serves_what_is_built_for_one(stages: Stages, workspace: Workspace, request_: BuildRequest, profile: str) -> None:
    """And a CPU the other."""
    stages.profile = profile
    build_all(workspace, request_)
    assert stages.served[-1].gpu is (profile == "cuda")


@pytest.mark.parametrize("rebuilt", [True, False])
def test_what_cannot_be_served_here_is_published_all_the_same(
    stages: Stages, workspace: Workspace, request_: BuildRequest, rebuilt: bool
) -> None:
    """Verified as ever, and the result says why it was not served; no stand-in is made for it."""
    if not rebuilt:
        build_all(workspace, request_)
        stages.called.clear()
    stages.unserved = "no GPU"
    result = build_all(workspace, request_)
    assert (result.rebuilt, result.smoke, result.unserved) == (rebuilt, None, "no GPU")
    assert stages.called == (["plan", "prefix", "stub", "archive", "verify", "publish"] if rebuilt else ["plan"])
    assert (result.model / "vllm_env.json").is_file()


def test_the_log_of_an_earlier_smoke_run_is_gone(stages: Stages, workspace: Workspace, request_: BuildRequest) -> None:
    """A message that names it must not lead to another server's lines."""
    log = workspace.cache.path("smoke-server.log")
    log.parent.mkdir()
    log.write_text("of an earlier run")
    build_all(workspace, request_)
    assert stages.served[-1].log == log
    assert not log.exists()


@pytest.fixture
def official(tmp_path: Path) -> Path:
    """A model folder of the official backend."""
    model = tmp_path / "official" / "opt"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text('backend: "vllm"')
    (tmp_path / "weights").mkdir()
    (model / "1" / "model.json").write_text(json.dumps({"model": str(tmp_path / "weights")}))
    return model


def adopted(request_: BuildRequest, official: Path, folder: Path) -> BuildRequest:
    """Ask for a model made from ``official``; what is staged for it lies in the new ``folder``."""
    adoption = read_adoption(official, request_.model_folder, TEMPLATE, "vllm_env.tar.gz")
    return replace(request_, adoption=adoption, template=stage_template(adoption, TEMPLATE, folder))


def test_an_adopted_model_is_served_itself_before_it_stands(
    stages: Stages, workspace: Workspace, request_: BuildRequest, official: Path, tmp_path: Path
) -> None:
    """With its own arguments, from the candidate; adopting again with nothing changed builds nothing, and serves it again."""
    result = build_all(workspace, adopted(request_, official, tmp_path / "first"))
    assert stages.called == ["plan", "prefix", "stub", "archive", "verify", "smoke run", "publish"]
    (served,) = stages.served
    weights = tmp_path / "weights"
    assert (served.own, served.engine_model, served.expected) == ({"1/model.json": {"model": str(weights)}}, str(weights), {})
    assert {path.name for path in result.model.iterdir()} == {*_SET, "1", "config.pbtxt"}
    assert not build_all(workspace, adopted(request_, official, tmp_path / "second")).rebuilt
    assert [one.own for one in stages.served] == [served.own] * 2
    (result.model / "1" / "triton_vllm" / "request" / "contract.py").write_text("# of an older version")
    assert build_all(workspace, adopted(request_, official, tmp_path / "third")).rebuilt
    (result.model / "config.pbtxt").unlink()
    assert build_all(workspace, adopted(request_, official, tmp_path / "fourth")).rebuilt
    assert (result.model / "config.pbtxt").is_file()


def test_an_adopted_model_that_is_not_here_is_served_as_the_standin(
    stages: Stages, workspace: Workspace, request_: BuildRequest, official: Path, tmp_path: Path
) -> None:
    """Or as the model that the command line names."""
    (official / "1" / "model.json").write_text('{"model": "/not/here"}')
    build_all(workspace, replace(adopted(request_, official, tmp_path / "first"), smoke_model="/mine"))
    assert (stages.served[-1].own, stages.served[-1].engine_model) == ({}, "/mine")
    build_all(workspace, adopted(request_, official, tmp_path / "second"))
    assert (stages.served[-1].own, stages.served[-1].engine_model) == ({}, str(stages.folder / "standin"))
    assert not (request_.model_folder / "vllm_engine_args.json").exists()
