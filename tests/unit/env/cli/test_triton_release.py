"""``--triton-release`` and roots anywhere: what a dry run says, and what a build prints at its end."""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
from typing import TYPE_CHECKING

import pytest

from support import triton_folder
from vllm_env.cli.main import main
from vllm_env.lock.lock import inputs_of
from vllm_env.lock.pins import PinnedVllm
from vllm_env.lock.pylock import Lock, LockedWheel, write_pylock
from vllm_env.lock.spec import Overrides, load_spec
from vllm_env.triton.elsewhere import triton_elsewhere
from vllm_env.triton.root import rules_of

if TYPE_CHECKING:
    from pathlib import Path

    from support.small_fixtures import Channel
    from vllm_env.build import BuildResult
    from vllm_env.model.manifest import Manifest

SETUPTOOLS = (LockedWheel("setuptools", "84.2.1", "setuptools-84.2.1-py3-none-any.whl", "3" * 64, 5),)


def _run(*arguments: object) -> int:
    return main([str(a) for a in arguments])


def write_spec_and_lock(folder: Path, channel: Channel, **values: str) -> None:
    """Write a spec of the profile cpu and its lock."""
    file = folder / "spec.toml"
    table = {"vllm": "0.99.0", "distribution": "vllm", "python": "3.11", **values}
    file.write_text("".join(["[profile.cpu]\n", *(f'{name} = "{value}"\n' for name, value in table.items())]))
    spec = load_spec("cpu", Overrides(), file)
    pinned = PinnedVllm("vllm==0.99.0", origin="release")
    wheels = (LockedWheel("vllm", "0.99.0", "vllm-0.99.0-py3-none-any.whl", "2" * 64, 5), *SETUPTOOLS)
    write_pylock(Lock(spec, pinned, channel.layer, wheels, inputs_of(spec, pinned)), folder / "pylock.spec-cpu.toml")


def test_a_dry_run_for_a_triton_elsewhere_says_so(
    channel: Channel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lock is one for this release, and a spec keeps it; the model would have no stub and not be served."""
    shutil.copytree(channel.root / "conda/channel", tmp_path / "cache/conda/channel")
    monkeypatch.setattr("vllm_env.plan.installed_triton", lambda: None)
    monkeypatch.setattr("vllm_env.triton.elsewhere.PYTHON", "3.11")  # that of this machine
    rules = dataclasses.replace(rules_of("26.07"), python="3.11")
    monkeypatch.setattr("vllm_env.triton.elsewhere.rules_of", lambda _: rules)
    write_spec_and_lock(tmp_path, channel, triton_release="26.07")
    options = ["--spec", tmp_path / "spec.toml", "--model-repository", tmp_path / "models", "--offline", "--dry-run", "--json"]
    assert _run(*options, "--profile", "cpu", "--locked") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["triton"], facts["stub"]) == ("26.07, not on this machine", "the server's own")
    assert facts["smoke_run"] == "not served here: Triton 26.07 is not on this machine"
    assert len(facts["key"]) == 32
    assert "/tmp" not in facts["bytes_needed"]
    assert _run(*options, "--profile", "cpu", "--locked", "--triton-release", "26.06") == 1
    assert "there is no lock of" in capsys.readouterr().err
    assert _run(*options, "--profile", "cpu", "--triton-release", "26.13") == 2
    assert "--triton-release 26.13 is not a release of Triton" in capsys.readouterr().err
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize("option", [["--smoke-run"], ["--smoke-model", "opt"], ["--warm"]])
def test_a_gpu_is_not_asked_for_where_the_triton_would_be_missing(
    option: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a machine with a GPU the same command would fail again."""
    monkeypatch.setattr("vllm_env.plan.installed_triton", lambda: None)
    monkeypatch.setattr("vllm_env.plan.has_gpu", lambda: False)
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
