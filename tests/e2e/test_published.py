"""What a build's smoke run says, that the commands which it ends with work, and that they serve what was built."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.leftovers import leftovers, wait_for_none
from support.mapped import libraries_of
from support.model_requests import ask
from support.repositories import CHECKOUT, run_build
from support.serving import READY_SECONDS, STALL_SECONDS
from support.triton_client import generate
from vllm_env.serve.server import Launch, TritonServer
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif("VLLM_ENV_TEST_ENVIRONMENT" in os.environ, reason="serves an environment that was not built"),
]
STARTED = Launch(ready_timeout=READY_SECONDS, stall_timeout=STALL_SECONDS)


@dataclass(frozen=True)
class Published:
    """A repository that a build with its smoke run has left, and the server that its last lines name.

    Attributes:
        repository: the model repository.
        stdout: what the build printed.
        stderr: and where it tells what it does.
        server: started with the command of the last line but one.
    """

    repository: Path
    stdout: list[str]
    stderr: str
    server: TritonServer


@pytest.fixture(scope="module")
def published(built_repository: Path, session_folder: Path) -> Iterator[Published]:
    """Built where no model hub answers, and served as built; nothing may be left of it."""
    before = leftovers(os.getpid())
    folder = session_folder / "published"
    copy = folder / "models"
    shutil.copytree(built_repository, copy, copy_function=os.link)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # discard: nothing listens there
        patch.setenv("HF_HOME", str(folder / "no models"))
        patch.setenv("VLLM_ENV_UNPACKED", str(folder / "unpacked"))  # the home is that of all tests
        done = run_build("--model-repository", str(copy))
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        binary, *_, option = shlex.split(lines[-2])  # a root elsewhere is told where its backends are
        assert option == f"--model-store={copy}"
        with TritonServer(CHECKOUT / binary, copy, log=folder / "server.log", launch=STARTED) as server:
            yield Published(copy, lines, done.stderr, server)
    wait_for_none(before)


def test_smoke_run_ends_with_the_answers_and_what_it_names_next_works(published: Published, tmp_path: Path) -> None:
    """Each prompt's answer, " Paris" among them, PASS, and two commands; where no model hub answers they work as well."""
    assert "no model hub answers" in published.stderr
    lines = published.stdout
    assert any(line.startswith("'The capital of France is' -> ' Paris") for line in lines)
    assert len([line for line in lines if " -> " in line]) == 4
    assert "PASS: vLLM example" in lines
    ask = [str(CHECKOUT / part) if part.endswith(".py") else part for part in shlex.split(lines[-1])]
    prompts = ["--input-prompts", str(CHECKOUT / "prompts.txt"), "--results-file", str(tmp_path / "results.txt")]
    command = [*ask, "--url", published.server.grpc_url, *prompts]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert asked.stdout.endswith("PASS: vLLM example\n"), asked.stderr


def test_a_second_build_prints_the_answers_without_serving(published: Published) -> None:
    """Those of the first one, under its date; the running server has changed nothing that they depend on."""
    done = run_build("--model-repository", str(published.repository))
    assert done.returncode == 0, done.stderr
    dated, *lines = done.stdout.splitlines()
    assert dated.startswith("the smoke run of 20")
    assert lines[:5] == published.stdout[:5]
    assert "smoke run …" not in done.stderr


def test_what_was_built_is_what_serves(published: Published) -> None:
    """vLLM's modules come from the environment that the smoke run's server has unpacked, and the next one uses."""
    assert generate(published.server.http_url, {"text_input": "The capital of France is"})[0] == 200
    loaded = libraries_of(published.server, "libtorch_cpu.so")
    assert loaded
    assert all(Path(path).is_relative_to(published.repository.parent / "unpacked") for path in loaded)
    assert "the environment is unpacked in" in published.server.log.read_text(errors="replace")


def test_the_standin_is_sure_of_each_token(published: Published) -> None:
    """So neither another attention kernel nor half precision changes its answers."""
    for question, answer in FACTS:
        flags = {"return_cumulative_logprob": True, "return_num_output_tokens": True}
        given = ask(published.server, question, {"temperature": 0, "max_tokens": 64, "logprobs": 1}, **flags)
        assert given.text == question + answer
        ((total,),), ((tokens,),) = given.values("cumulative_logprob"), given.values("num_output_tokens")
        assert total >= tokens * math.log(0.94)  # it was trained until each was 0.95 likely
