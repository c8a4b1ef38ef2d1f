"""The stand-in: when a model is made, when the cached one serves, and what a failure leaves."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from support.listener import Listener
from support.repositories import CHECKOUT
from support.small_fixtures import workspace_in
from vllm_env.base.errors import CommandError
from vllm_env.base.report import reporting_to
from vllm_env.serve.standin import FACTS, ensure_standin

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter's stand-in: counts its runs and writes what the trainer would, or fails."""
    path = tmp_path / "environment" / "bin" / "python"
    path.parent.mkdir(parents=True)
    path.write_text(
        f"""#!/bin/sh
'''exec' "{sys.executable}" "$0" "$@"
' '''
import pathlib, sys
runs = pathlib.Path({str(tmp_path / "runs")!r})
runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
out = pathlib.Path(sys.argv[3])
(out / "tokenizer.json").write_text("{{}}")
if pathlib.Path({str(tmp_path / "fail")!r}).exists():
    sys.exit("error: after 1500 steps a token of an answer has probability 0.10")
(out / "config.json").write_text(open(sys.argv[2]).read())
(out / "config.json").chmod(0o600)
"""
    )
    path.chmod(0o755)
    return path


def test_same_recipe_is_made_once(python: Path, tmp_path: Path) -> None:
    """The second call takes the cached folder and says nothing."""
    console = Listener()
    workspace = workspace_in(tmp_path / "cache")
    with reporting_to(console):
        first = ensure_standin(workspace, python)
        second = ensure_standin(workspace, python)
    assert first == second
    assert (tmp_path / "runs").read_text() == "x"
    assert len(console.heard) == 1
    assert (first / "config.json").stat().st_mode & 0o777 == 0o644
    assert first.stat().st_mode & 0o777 == 0o755


def test_failed_training_keeps_nothing(python: Path, tmp_path: Path) -> None:
    """The error carries what the trainer said; no half-made model is found by the next call."""
    (tmp_path / "fail").touch()
    with pytest.raises(CommandError, match="no-smoke-run") as failed:
        ensure_standin(workspace_in(tmp_path / "cache"), python)
    assert "probability 0.10" in failed.value.tail
    assert not list((tmp_path / "cache").glob("standins/*"))
    assert not list((tmp_path / "cache").glob("build/*"))
    (tmp_path / "fail").unlink()
    assert (ensure_standin(workspace_in(tmp_path / "cache"), python) / "config.json").is_file()


def test_facts_are_the_prompts_of_the_project() -> None:
    """The smoke run checks prompts.txt, so the stand-in must know all of it, and France's capital."""
    assert [prompt for prompt, _ in FACTS] == (CHECKOUT / "prompts.txt").read_text().splitlines()
    assert dict(FACTS)["The capital of France is"].startswith(" Paris")
