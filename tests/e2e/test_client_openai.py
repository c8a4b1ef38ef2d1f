"""The client against vLLM's OpenAI server, which runs next to Triton's here, and against both servers in turns."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from support.repositories import client_command
from support.settings import openai_url
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_env.serve.server import TritonServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture
def vllm_server(server: TritonServer) -> str:
    """``host:port`` of vLLM's server with the stand-in, over the engine that Triton serves: it costs no second one."""
    return openai_url(server).removeprefix("http://")


def run(folder: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """Run the client; return what it printed and its report."""
    argv = client_command(*arguments, "--report", "report.json")
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout, json.loads((folder / "report.json").read_text())


@pytest.mark.parametrize("mode", [[], ["--streaming-mode"]])
def test_vllms_server_is_measured_as_triton_is(vllm_server: str, server: TritonServer, tmp_path: Path, mode: list[str]) -> None:
    """The same answers and the same number of tokens from both: each is the one that was taught."""
    flags = ["--iterations", "10", "--exclude-inputs-in-outputs", *mode]
    output, found = run(tmp_path, "--backend", "openai", "-u", vllm_server, *flags)
    texts = (tmp_path / "results.txt").read_text().split("\n\n=========\n\n")
    assert texts == [*(answer for _, answer in FACTS * 10), ""]
    assert output.endswith("PASS: vLLM example\n")
    _, expected = run(tmp_path, "-u", server.grpc_url, *flags)
    for name in ("completed", "total_input_tokens", "total_output_tokens"):
        assert found[name] == expected[name] > 0
    assert (found["median_tpot_ms"] is None) == (not mode)
    assert found["median_e2el_ms"] > 0


def test_every_token_of_a_stream_is_a_piece_and_the_server_counts_them(vllm_server: str, tmp_path: Path) -> None:
    """Exactly as many as were asked for; vLLM may put several in a piece on a busy machine."""
    flags = ["-s", "--random-input-len", "8", "--random-output-len", "12", "--num-prompts", "16", "--max-concurrency", "4"]
    records = ["--results-format", "jsonl", "--results-file", "r.jsonl"]
    _, report = run(tmp_path, "--backend", "openai", "-u", vllm_server, *flags, *records)
    assert report["total_output_tokens"] == 16 * 12
    found = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert {record["output_tokens"] for record in found} == {12}
    assert {tuple(record["finish_reasons"]) for record in found} == {("length",)}
    assert all(2 <= len(record["times"]) <= 12 for record in found)


def test_a_request_that_vllms_server_refuses_fails_with_its_reason(vllm_server: str, tmp_path: Path) -> None:
    """A prompt that is too long; the other one is answered."""
    (tmp_path / "prompts.txt").write_text("The capital of France is\n" + "word " * 2000 + "\n")
    argv = client_command("--backend", "openai", "-u", vllm_server, "-s")
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "2 sent, 1 answered, 1 failed (1 status 400)" in done.stdout
    assert "this model's maximum context length is 256 tokens" in done.stderr


def test_both_servers_are_compared_in_turns(vllm_server: str, server: TritonServer, tmp_path: Path) -> None:
    """Each has the same requests, and each figure is compared."""
    flags = ["--versus", vllm_server, "--versus-backend", "openai", "-s", "--iterations", "20"]
    _, report = run(tmp_path, "-u", server.grpc_url, *flags)
    assert report["completed"] == report["versus"]["completed"] == 80
    for name in ("output_throughput", "median_ttft_ms", "median_e2el_ms"):
        assert report["versus"][name]["pairs"] == report["versus"]["blocks"] == 20
    assert report["versus"]["median_tpot_ms"] is not None  # on a busy machine, an answer may come in one piece
