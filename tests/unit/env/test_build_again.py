"""A build with nothing to build: what is served again, and whose answers are known."""

from __future__ import annotations

import errno
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from support.build_stages import Stages, build_all
from vllm_env.layout.layouts import LAYOUTS
from vllm_env.sketch import BuildRequest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from vllm_env.base.workspace import Workspace


def test_what_stands_there_already_is_not_built_again(
    stages: Stages, workspace: Workspace, request_: BuildRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor served again: its answers are known. It is warmed if that is asked for."""
    first = build_all(workspace, request_)
    assert first.smoke
    stages.called.clear()
    second = build_all(workspace, replace(request_, warm=True))
    assert stages.called == ["plan", "warm"]
    assert second.smoke == replace(first.smoke, client_lines=first.smoke.client_lines[-1:], engine_args={}, recalled=True)
    assert (second.rebuilt, second.manifest.to_json()) == (False, first.manifest.to_json())
    assert "is up to date; nothing to build" in capsys.readouterr().err
    stages.called.clear()
    third = build_all(workspace, replace(request_, smoke=False))
    assert stages.called == ["plan"]
    assert (third.smoke, third.warmed) == (None, None)


def test_another_count_is_built_and_served(stages: Stages, workspace: Workspace, request_: BuildRequest) -> None:
    """Once; and a build without the option leaves it."""
    build_all(workspace, request_)
    again = build_all(workspace, replace(request_, count=2))
    config = request_.model_folder / "config.pbtxt"
    assert (again.rebuilt, "count: 2" in config.read_text()) == (True, True)
    stages.called.clear()
    assert not build_all(workspace, replace(request_, count=2)).rebuilt
    assert not build_all(workspace, request_).rebuilt
    assert stages.called == ["plan", "plan"]
    assert "count: 2" in config.read_text()


def test_a_new_model_for_gpus_has_two_front_ends(stages: Stages, workspace: Workspace, request_: BuildRequest) -> None:
    """The user's own number stays, in the option and in the file."""
    stages.profile = "cuda"
    build_all(workspace, request_)
    config = request_.model_folder / "config.pbtxt"
    assert "count: 2" in config.read_text()
    config.write_text(config.read_text().replace("count: 2", "count: 1"))
    stages.key = "another"
    assert build_all(workspace, request_).rebuilt
    assert "count: 1" in config.read_text()
    build_all(workspace, replace(request_, model="one", count=1))
    assert "count: 1" in (request_.repository / "one" / "config.pbtxt").read_text()
    own = request_.repository / "own"
    shutil.copytree(request_.model_folder / "1", own / "1")
    (own / "config.pbtxt").write_text(f"# mine\n{config.read_text()}")
    build_all(workspace, replace(request_, model="own"))
    assert "count: 1" in (own / "config.pbtxt").read_text()


_SERVED = ["plan", "prefix", "stand-in", "smoke run"]


def _edit(model: Path) -> None:
    (model / "1" / "model.py").write_text("# mine")


@pytest.mark.parametrize(
    ("change", "options", "called"),
    [
        pytest.param(lambda _: None, {"smoke_again": True}, _SERVED, id="--smoke-run"),
        pytest.param(lambda _: None, {"smoke_model": "opt"}, ["plan", "smoke run"], id="--smoke-model"),
        pytest.param(_edit, {}, _SERVED, id="another code"),
        pytest.param(lambda model: (model / "vllm_engine_args.json").unlink(), {}, _SERVED, id="without engine arguments"),
    ],
)
def test_what_has_changed_is_served_again_where_it_stands(
    stages: Stages,
    workspace: Workspace,
    request_: BuildRequest,
    change: Callable[[Path], object],
    options: dict[str, Any],
    called: list[str],
) -> None:
    """Once: the next build knows that run, or with --smoke-model the one before. test_proof.py has all that is a change."""
    build_all(workspace, request_)
    stages.called.clear()
    change(request_.model_folder)
    again = build_all(workspace, replace(request_, **options))
    assert (stages.called, again.rebuilt) == (called, False)
    served = stages.served[-1].model_folder
    assert (served.name, served.is_relative_to(workspace.cache.path("build"))) == (request_.model, True)
    stages.called.clear()
    third = build_all(workspace, request_)
    assert stages.called == ["plan"]
    assert third.smoke
    assert third.smoke.recalled


def test_a_proof_that_cannot_be_kept_is_no_failure(
    stages: Stages, workspace: Workspace, request_: BuildRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is published. The cache's disk is full, say."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("vllm_env.smoke_stage.remember", full)
    assert build_all(workspace, request_).smoke
    stages.called.clear()
    assert build_all(workspace, request_).smoke
    assert stages.called == _SERVED


def test_a_folder_as_environment_is_served_each_time(stages: Stages, workspace: Workspace, request_: BuildRequest) -> None:
    """Any of its 60,000 files may have been changed."""
    request = replace(request_, layout=LAYOUTS["directory"])
    build_all(workspace, request)
    stages.called.clear()
    build_all(workspace, request)
    assert stages.called == _SERVED


@pytest.mark.parametrize("again", [False, True])
def test_what_was_edited_while_it_was_served_counts_as_not_served(
    stages: Stages, workspace: Workspace, request_: BuildRequest, again: bool
) -> None:
    """The answers are those of the files from before; the server had a copy."""
    model = build_all(workspace, replace(request_, smoke=False)).model
    if not again:
        stages.key = "another"
    stages.during = lambda: _edit(model)
    assert build_all(workspace, request_).rebuilt is not again
    stages.called.clear()
    stages.during = lambda: None
    build_all(workspace, request_)
    assert stages.called == _SERVED
