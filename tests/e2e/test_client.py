"""The client against stock tritonserver, with the built environment and the stand-in model."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from support.repositories import CHECKOUT, client_command
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_env.serve.server import TritonServer

pytestmark = pytest.mark.e2e


def run(server: TritonServer, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = client_command("-u", server.grpc_url, *arguments)
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("mode", [[], ["--streaming-mode"]])
def test_forty_results_in_the_order_of_the_prompts(server: TritonServer, tmp_path: Path, mode: list[str]) -> None:
    """Four prompts, ten times, whole and streamed: every answer is the one that was taught, in its place."""
    prompts = CHECKOUT / "prompts.txt"
    done = run(server, tmp_path, "--iterations", "10", "--exclude-inputs-in-outputs", *mode)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[:2] == [f"Loading inputs from `{prompts}`...", "Storing results into `results.txt`..."]
    assert lines[-1] == "PASS: vLLM example"
    assert any(line.startswith("Requests: 40 sent, 40 answered, in ") for line in lines)
    results = (tmp_path / "results.txt").read_text().split("\n\n=========\n\n")
    assert results == [*(answer for _, answer in FACTS * 10), ""]


@pytest.mark.parametrize(("mode", "with_prompt"), [([], True), (["--streaming-mode"], False)])
def test_the_prompt_comes_back_in_whole_answers_only(
    server: TritonServer, tmp_path: Path, mode: list[str], with_prompt: bool
) -> None:
    """As with the official sample: a stream never has it, and no answer has it with --exclude-inputs-in-outputs (above)."""
    done = run(server, tmp_path, *mode)
    assert done.returncode == 0, done.stderr
    results = (tmp_path / "results.txt").read_text().split("\n\n=========\n\n")
    assert results == [*((prompt if with_prompt else "") + answer for prompt, answer in FACTS), ""]
    assert f'"{FACTS[2][0]}" -> "{FACTS[2][1]}"' in done.stdout.splitlines()


def test_failed_request_does_not_spoil_the_others(server: TritonServer, tmp_path: Path) -> None:
    """A prompt longer than the model takes fails alone: FAIL, its number and reason, and the answer before it."""
    (tmp_path / "prompts.txt").write_text("The capital of France is\n" + "word " * 2000 + "\n")
    done = run(server, tmp_path, "--verbose")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "FAIL: vLLM example"
    assert '"The capital of France is" -> " Paris' in done.stdout
    assert "error: request 1 (" in done.stderr
    assert "request 0" not in done.stderr


def test_server_still_answers_after_a_client_gave_up(server: TritonServer, tmp_path: Path) -> None:
    """A stream that times out costs the next client nothing."""
    prompts = str(CHECKOUT / "prompts.txt")
    run(server, tmp_path, "--iterations", "50", "--stream-timeout", "0.05", "--input-prompts", prompts)
    done = run(server, tmp_path, "--input-prompts", prompts)
    assert done.returncode == 0, done.stderr
