"""The command line makes a model from a folder of the official backend, which stays as it was; killed at any moment, too."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from support import adopter, small_build
from support.patience import pause
from support.repositories import triton_root

if TYPE_CHECKING:
    from pathlib import Path

    from support.chaos_lab import Lab

_CONFIG = """\
backend: "vllm"

# The usage of device is deferred to the vLLM engine
instance_group [
  {
    count: 1
    kind: KIND_MODEL
  }
]
"""
_ARGUMENTS = """\
{
    "model":"facebook/opt-125m",
    "disable_log_requests": true,
    "gpu_memory_utilization": 0.5,
    "enforce_eager": true
}
"""


@pytest.fixture
def official(tmp_path: Path) -> Path:
    """The model folder of the official backend's tutorial."""
    model = tmp_path / "theirs" / "opt"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(_CONFIG)
    (model / "1" / "model.json").write_text(_ARGUMENTS)
    return model


def _files(model: Path) -> dict[str, bytes]:
    return {str(path.relative_to(model)): path.read_bytes() for path in model.rglob("*") if path.is_file()}


def _snapshot(folder: Path) -> dict[str, tuple[bytes, int, int, int]]:
    """Every file and folder, with content, mode, time of change and number of names."""
    found = {}
    for path in (folder, *folder.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        names = status.st_nlink if path.is_file() else 0
        found[str(path.relative_to(folder))] = (content, status.st_mode, status.st_mtime_ns, names)
    return found


def test_the_command(official: Path, tmp_path: Path, thin_lab: Lab) -> None:
    """Shown first; then built, checked and placed; again; the plain build takes it from there."""
    before = _snapshot(official)
    repository = tmp_path / "place" / "models"
    target = repository / "opt"
    root = ("--spec", thin_lab.spec, "--triton-root", triton_root())

    def run(*options: object) -> subprocess.CompletedProcess[str]:
        argv = small_build.command(repository, *root, *options)
        return _run([*argv[:3], "adopt", str(official), *argv[3:]], thin_lab)

    shown = run("--dry-run")
    assert shown.returncode == 0, shown.stderr
    assert '-backend: "vllm"\n+backend: "python"' in shown.stderr
    assert shown.stdout == ""
    assert not repository.exists()
    done = run("--json")
    assert done.returncode == 0, done.stderr
    assert '+backend: "python"' in done.stderr
    facts = json.loads(done.stdout)
    assert (facts["source"], facts["model"], facts["left"]) == (str(official), str(target), [])
    assert (facts["changed"], facts["smoke_run"]) == (True, None)
    assert '-backend: "vllm"\n+backend: "python"' in facts["difference"]
    after = _files(target)
    assert after["1/model.json"].decode() == _ARGUMENTS
    assert {"config.pbtxt", "vllm_env.tar.gz", "1/triton_vllm/request/contract.py"} <= after.keys()
    assert "vllm_engine_args.json" not in after
    assert [path.name for path in repository.iterdir()] == ["opt"]
    assert _snapshot(official) == before

    again = _run(small_build.command(repository, "--model", "opt", *root), thin_lab)
    assert again.returncode == 0, again.stderr
    assert _files(target) == after
    place = ["--model-repository", str(repository), "--model", "opt"]
    verified = _run([*small_build.command(repository)[:3], "verify", *place], thin_lab)
    assert verified.returncode == 0, verified.stderr

    code = target / "1" / "model.py"
    code.write_text("# old\n")
    (target / "mine.json").write_text("{}")
    refreshed = run()
    assert refreshed.returncode == 0, refreshed.stderr
    where, next_line, serve, ask = refreshed.stdout.splitlines()
    assert (where.split(":")[0], next_line) == (str(target), "Next:")
    assert serve.endswith(f"bin/tritonserver --model-store={repository}")
    assert "--model opt" in ask
    assert "was adopted before: its environment and code are replaced" in refreshed.stderr
    found = _files(target)
    assert found.pop("mine.json") == b"{}"
    assert found.keys() == after.keys()
    assert found["1/model.py"] == after["1/model.py"]
    assert _snapshot(official) == before


def test_refusals_leave_all_as_it_was(official: Path, tmp_path: Path, thin_lab: Lab) -> None:
    """A build beside the official configuration, and a target that is SOURCE, inside it, or another model."""
    root = ("--spec", thin_lab.spec, "--triton-root", triton_root())
    another = tmp_path / "models" / "opt"
    another.mkdir(parents=True)
    (another / "config.pbtxt").write_text('backend: "python"')
    before = _snapshot(tmp_path / "theirs"), _snapshot(tmp_path / "models")

    for repository, said in (
        (official.parent, "or one lies inside the other"),
        (official / "1", "or one lies inside the other"),
        (another.parent, "its manifest does not say that it was adopted from"),
    ):
        argv = small_build.command(repository, *root)
        refused = _run([*argv[:3], "adopt", str(official), *argv[3:]], thin_lab)
        assert refused.returncode == 1
        assert said in refused.stderr
        assert "  fix: " in refused.stderr
    refused = _run(small_build.command(official.parent, "--model", "opt", *root), thin_lab)
    assert refused.returncode == 1
    assert f"./gen_vllm_env.sh adopt {official}" in refused.stderr
    assert (_snapshot(tmp_path / "theirs"), _snapshot(tmp_path / "models")) == before


def _run(argv: list[str], lab: Lab) -> subprocess.CompletedProcess[str]:
    environment = small_build.environment(lab.cache, **lab.variables)
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.slow
def test_killed_it_leaves_no_model_or_a_whole_one(official: Path, tmp_path: Path) -> None:
    """Killed at random moments until both were met; the official folder is as it was, whenever that is."""
    made = tmp_path / "made"
    made.mkdir()
    for name in ("stub", "environment"):
        (made / name).write_text(name)
    (made / "manifest").write_text(json.dumps({"adopted_from": str(official)}))
    target = tmp_path / "place" / "models" / "opt"
    before = _snapshot(official)
    seen: list[bool] = []
    adopter.adopt(official, target, made)
    whole = _files(target)
    target.rename(tmp_path / "whole")
    while len(seen) < 25 or (len(set(seen)) < 2 and len(seen) < 500):
        child = adopter.start(official, target, made)
        pause(random.uniform(0, 0.1 * 2 ** (len(seen) // 25)))  # a slow machine gets to the other state later
        assert child.pid
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        assert child.exitcode == -signal.SIGKILL
        assert _snapshot(official) == before
        seen.append(target.exists())
        if seen[-1]:
            assert _files(target) == whole
            target.rename(tmp_path / f"found-{len(seen)}")
    assert set(seen) == {True, False}
