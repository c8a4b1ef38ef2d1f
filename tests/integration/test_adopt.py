"""The command line adopts a model's folder and gives it back; killed at any moment, the folder is one or the other."""

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
from support.small_fixtures import workspace_in
from vllm_env.plan import TEMPLATE
from vllm_env.publish.adopt import read_adoption, undo

if TYPE_CHECKING:
    from pathlib import Path

    from support.chaos_lab import Lab

_CONFIG = '# mine\nbackend: "vllm"\ninstance_group [{ count: 1 kind: KIND_MODEL }]\n'


@pytest.fixture
def official(tmp_path: Path) -> Path:
    """A model's folder of the official backend."""
    model = tmp_path / "place" / "models" / "opt"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(_CONFIG)
    (model / "1" / "model.json").write_text('{"model": "org/name"}')
    return model


def _files(model: Path) -> dict[str, bytes]:
    return {str(path.relative_to(model)): path.read_bytes() for path in model.rglob("*") if path.is_file()}


def test_the_command_there_and_back(official: Path, thin_lab: Lab) -> None:
    """Shown first; then built, checked and placed; the plain build takes it from there; back, byte for byte."""
    before = _files(official)

    def run(*options: object) -> subprocess.CompletedProcess[str]:
        argv = [option for option in small_build.command(official.parent, *options) if option != "--model-repository"]
        argv.remove(str(official.parent))
        return _run([*argv[:3], "adopt", str(official), *argv[3:]], thin_lab)

    root = ("--spec", thin_lab.spec, "--triton-root", triton_root())
    shown = run("--dry-run", *root)
    assert shown.returncode == 0, shown.stderr
    assert '-backend: "vllm"\n+backend: "python"' in shown.stderr
    assert (_files(official), shown.stdout) == (before, "")
    done = run(*root, "--json")
    assert done.returncode == 0, done.stderr
    assert '+backend: "python"' in done.stderr
    facts = json.loads(done.stdout)
    assert (facts["model"], facts["changed"], facts["smoke_run"]) == (str(official), True, [])
    assert '-backend: "vllm"\n+backend: "python"' in facts["difference"]
    after = _files(official)
    assert {name: after[name] for name in before if name != "config.pbtxt"} == {"1/model.json": before["1/model.json"]}
    assert {"vllm_env.tar.gz", "1/triton_vllm/request/contract.py"} <= after.keys()
    assert "vllm_engine_args.json" not in after

    again = _run(small_build.command(official.parent, "--model", "opt", *root), thin_lab)
    assert again.returncode == 0, again.stderr
    assert _files(official) == after
    place = ["--model-repository", str(official.parent), "--model", "opt"]
    verified = _run([*small_build.command(official.parent)[:3], "verify", *place], thin_lab)
    assert verified.returncode == 0, verified.stderr
    back = run("--undo")
    assert back.returncode == 0, back.stderr
    assert _files(official) == before
    refused = _run(small_build.command(official.parent, "--model", "opt", *root), thin_lab)
    assert (refused.returncode, _files(official)) == (1, before)
    assert f"./gen_vllm_env.sh adopt {official}" in refused.stderr


def _run(argv: list[str], lab: Lab) -> subprocess.CompletedProcess[str]:
    environment = small_build.environment(lab.cache, **lab.variables)
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=300)


def test_killed_it_leaves_the_old_or_the_new(official: Path, tmp_path: Path) -> None:
    """Killed at random moments until both were met: the folder is the official one or the adopted one, whole."""
    made = tmp_path / "made"
    made.mkdir()
    for name in ("stub", "environment"):
        (made / name).write_text(name)
    before, seen = _files(official), []
    while len(seen) < 25 or (len(set(seen)) < 2 and len(seen) < 500):
        child = adopter.start(official, made)
        pause(random.uniform(0, 0.1 * 2 ** (len(seen) // 25)))  # a slow machine gets to the other state later
        assert child.pid
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        assert child.exitcode == -signal.SIGKILL
        found = _files(official)
        seen.append("vllm_env.json" in found)
        if not seen[-1]:
            assert found == before
            continue
        new = read_adoption(official, TEMPLATE, "vllm_env.tar.gz")
        assert (new.diff, new.saved) == ("", ())
        assert found[".before_vllm_env/config.pbtxt"] == before["config.pbtxt"]
        assert found["vllm_env.tar.gz"] == b"environment"
        undo(workspace_in(made), official)
        assert _files(official) == before
    assert set(seen) == {True, False}
