"""``--triton-release`` and roots anywhere: what a dry run says, and what a build prints at its end."""

from __future__ import annotations

import dataclasses
import shlex
from typing import TYPE_CHECKING

import pytest

from support import triton_folder
from vllm_env.cli.main import main
from vllm_env.triton.elsewhere import triton_elsewhere

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_env.build import BuildResult
    from vllm_env.model.manifest import Manifest


def _run(*arguments: object) -> int:
    return main([str(a) for a in arguments])


@pytest.mark.parametrize("option", [["--smoke-run"], ["--smoke-model", "opt"], ["--warm"]])
def test_a_gpu_is_not_asked_for_where_the_triton_would_be_missing(
    option: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a machine with a GPU the same command would fail again."""
    monkeypatch.setattr("vllm_env.sketch.installed_triton", lambda: None)
    monkeypatch.setattr("vllm_env.sketch.has_gpu", lambda: False)
    options = ["--profile", "cuda", "--model-repository", tmp_path / "models", "--dry-run", *option]
    assert _run(*options, "--triton-release", "26.07") == 2
    assert f"{option[0]}: with --triton-release, Triton 26.07 is not on this machine" in capsys.readouterr().err
    assert _run(*options) == 1
    assert f"{option[0]}: this machine has no GPU" in capsys.readouterr().err


def test_a_model_for_cuda_says_for_which_triton_it_is(
    built: BuildResult, manifest: Manifest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The Triton of the wheel is seldom the one that will serve it. A named Triton is one that the user has chosen."""
    cuda = dataclasses.replace(built, manifest=dataclasses.replace(manifest, spec={"profile": "cuda"}))
    monkeypatch.setattr("vllm_env.cli.main.build", lambda *_, **__: cuda)
    assert _run() == 0
    assert "For another release" not in capsys.readouterr().out
    monkeypatch.setattr("vllm_env.cli.next_steps.PROVISIONED", built.triton.path)
    assert _run() == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == (
        "It is for Triton 24.10 only. For another release: --triton-release YY.MM (since 24.11), or build in its container"
    )
    monkeypatch.setattr("vllm_env.cli.main.build", lambda *_, **__: built)
    assert _run() == 0
    assert "For another release" not in capsys.readouterr().out


@pytest.mark.parametrize("profile", ["cpu", "cuda"])
def test_a_model_for_a_triton_elsewhere_is_served_in_its_container(
    built: BuildResult,
    manifest: Manifest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    profile: str,
) -> None:
    """What to type there, with the GPUs for cuda."""
    made = dataclasses.replace(manifest, triton_release="26.07", spec={"profile": profile})
    result = dataclasses.replace(built, manifest=made, triton=triton_elsewhere("26.07"), smoke=None, unserved="not here")
    monkeypatch.setattr("vllm_env.cli.main.build", lambda *_, **__: result)
    assert _run("--model-repository", tmp_path / "models") == 0
    serve, _, reason = capsys.readouterr().out.splitlines()[-3:]
    command = shlex.split(serve)
    assert command[:2] == ["docker", "run"]
    assert ("--gpus" in command) == (profile == "cuda")
    place = ["-v", f"{tmp_path}/models:/models", "nvcr.io/nvidia/tritonserver:26.07-py3"]
    assert command[-5:] == [*place, "tritonserver", "--model-store=/models"]
    assert reason == "not served here: not here"


def test_a_triton_anywhere_is_started_with_its_backends(
    built: BuildResult, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The printed command works for a root that is neither the container's nor a provisioned one."""
    root = triton_folder.make_root(built.triton.path)
    (root / "backends/python").mkdir(parents=True, exist_ok=True)
    assert _run() == 0
    serve = shlex.split(capsys.readouterr().out.splitlines()[-2])
    assert serve[:2] == [f"{root}/bin/tritonserver", f"--backend-directory={root}/backends"]
