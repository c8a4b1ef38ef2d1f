"""What users read after likely mistakes, on a real server: each sentence names the mistake, once, and is in the docs."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.client_run import run as run_client
from support.model_control import load
from support.pages import requests_in
from support.patience import LIMIT
from support.repositories import CHECKOUT
from support.serving import EXPLICIT
from support.triton_client import post
from vllm_env.base.errors import CommandError
from vllm_env.serve.server import TritonServer
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.serving import Parts, Serve

pytestmark = pytest.mark.e2e
PAGE = CHECKOUT / "docs" / "troubleshooting.md"
PROMPT, ANSWER = FACTS[2]


def without_model(model: Path) -> None:
    """Take the name of the model away."""
    file = model / "vllm_engine_args.json"
    values = {name: value for name, value in json.loads(file.read_text()).items() if name != "model"}
    file.write_text(json.dumps(values))


def with_batches(model: Path) -> None:
    """Let Triton make batches."""
    config = model / "config.pbtxt"
    text = config.read_text()
    assert "max_batch_size: 0" in text
    config.write_text(text.replace("max_batch_size: 0", "max_batch_size: 8"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without_model, 'vllm_engine_args.json: "model" is missing; write the name of a model on the hub'),
        (with_batches, "config.pbtxt: max_batch_size is 8: write max_batch_size: 0, because vLLM makes the batches itself"),
    ],
)
def test_a_model_that_cannot_be_loaded_says_why_in_the_last_line(
    light_serving: Serve, change: Callable[[Path], None], reason: str
) -> None:
    """Of the packager's report, with the reason once; and over HTTP, where no frame but Triton's call is in the answer."""
    with pytest.raises(CommandError) as failed, light_serving(prepare=change):
        pass
    lines = failed.value.lines()
    assert lines[-1].startswith(f"  why: {reason}")
    assert "\n".join(lines).count(reason) == 1
    assert "\n".join(lines).count("ConfigError") == 0
    assert len(lines) == 2
    with light_serving(arguments=(EXPLICIT,), prepare=change) as server:
        status, answer = load(server)
        said = server.log.read_text(errors="replace")
    assert status == 400
    assert f"ConfigError: {reason}" in json.loads(answer)["error"]
    assert json.loads(answer)["error"].count("/model.py(") == 1
    assert "triton_vllm/" not in answer
    # Triton's own: the stub, the instance and the model; a server that ends prints a table, too
    assert said.replace('\\"', '"').count(reason) <= 3


def test_a_server_before_any_build_is_explained(parts: Parts, tmp_path: Path) -> None:
    """The text is Triton's own, and the page has it."""
    shutil.copytree(CHECKOUT / "model_repository" / "vllm" / "1", tmp_path / "models" / "vllm" / "1")
    shutil.copy(CHECKOUT / "model_repository" / "vllm" / "config.pbtxt", tmp_path / "models" / "vllm")
    with pytest.raises(CommandError) as failed, TritonServer(parts.binary, tmp_path / "models", log=tmp_path / "log"):
        pass
    cause = failed.value.cause
    begins, ends = "Failed to get the canonical path for ", "vllm_env.tar.gz"
    assert begins in cause
    assert ends in cause
    assert f'| "{begins}…{ends}"' in PAGE.read_text("utf-8")


def test_a_list_among_the_parameters_is_explained(server: TritonServer) -> None:
    """Triton's text is on the page, and so is a line that works."""
    ((path, body),) = requests_in(PAGE, "test_pasted.py")
    status, answer = post(server.http_url, path, {"text_input": PROMPT, "parameters": {"stop": ["x"]}}, timeout=LIMIT)
    assert status == 400
    assert "has invalid type" in answer
    assert '| "has invalid type"' in PAGE.read_text("utf-8")
    status, answer = post(server.http_url, path, body, timeout=LIMIT)
    assert status == 200
    assert json.loads(answer)["text_output"] == f"{PROMPT} Paris"


def test_one_prompt_on_the_command_line_is_answered_and_a_wrong_name_is_told_at_once(
    light_serving: Serve, tmp_path: Path
) -> None:
    """By the real server; the names that there are come with the error."""
    with light_serving() as server:
        done = run_client("-u", server.grpc_url, PROMPT, cwd=tmp_path)
        began = time.monotonic()
        wrong = run_client("-u", server.grpc_url, "--model", "vlm", "--wait-ready", 3600, PROMPT, cwd=tmp_path)
        seconds = time.monotonic() - began
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[2] == f"{json.dumps(PROMPT)} -> {json.dumps(ANSWER)}"
    assert wrong.returncode == 1
    assert wrong.stderr.endswith("has no model 'vlm', but vllm; name one of them with --model\n")
    assert seconds < LIMIT
