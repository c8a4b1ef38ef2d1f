"""`serve` and `client` as a user types them: what is started, with which arguments, and what is refused before."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from support.repositories import CHECKOUT
from support.triton_folder import make_root
from vllm_env.base.machine import PLATFORMS, this_platform

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.long
OTHER = next(name for name in PLATFORMS if name != this_platform().name)
PORTS = ("--http-port=1", "--grpc-port=2", "--metrics-port", "3")
"""All named, so that what listens on this machine does not matter."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A Triton whose server prints its arguments and where Python would import from."""
    root = make_root(tmp_path / "triton")
    (root / "bin/tritonserver").write_text('#!/bin/sh\nprintf "%s\\n" "$@" "$PYTHONPATH"\nexit 7\n')
    return root


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A repository with two built models."""
    for name in ("vllm", "chat"):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "vllm_env.json").write_text("{}")
    return tmp_path / "models"


def typed(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vllm_env", *map(str, arguments)]
    variables = {**os.environ, "PYTHONPATH": str(CHECKOUT / "env")}
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("named", [[], ["chat"]])
def test_serve_becomes_tritonserver(root: Path, models: Path, named: list[str]) -> None:
    """Its exit code is the server's. The server finds its backends, and vLLM does not import from the packager."""
    options = [f"--model={name}" for name in named]
    done = typed("serve", "--triton-root", root, "--model-repository", models, *options, "--", *PORTS)
    only = ["--model-control-mode=explicit", "--load-model=chat"] if named else []
    expected = [f"--backend-directory={root}/backends", f"--model-store={models}", *only, *PORTS, ""]
    assert (done.returncode, done.stdout.splitlines()) == (7, expected), done.stderr


@pytest.mark.parametrize(
    ("options", "what", "remedy"),
    [
        (["--model-repository", "none"], "none has no built model.", "Build it"),
        (["--model-repository", "models", "--model", "opt"], "models has no built model opt.", "Build it"),
        (["--model-repository", "models/vllm"], "models/vllm has no built model.", "--model-repository {tmp_path}/models"),
        (
            ["--model-repository", "my models"],
            "starts no model in my models",
            "ln -sfn '{tmp_path}/my models' /tmp/vllm_env_models-",
        ),
        (["--triton-root", "models"], "is not a Triton installation", "bin/ and backends/"),
    ],
)
def test_what_cannot_be_served_is_refused_with_a_remedy(
    root: Path, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], what: str, remedy: str
) -> None:
    """Before tritonserver starts, whose own messages name neither."""
    (models / "vllm" / "config.pbtxt").touch()
    (tmp_path / "my models").symlink_to(models)
    monkeypatch.chdir(tmp_path)
    done = typed("serve", "--triton-root", root, *options, "--", *PORTS)
    assert (done.returncode in (1, 2), done.stdout) == (True, "")
    assert what in done.stderr
    assert remedy.format(tmp_path=tmp_path) in done.stderr


@pytest.mark.parametrize("named", [(), ("--model", "chat")])
def test_a_model_for_other_machines_is_not_served(root: Path, models: Path, named: tuple[str, ...]) -> None:
    """Triton would wait for its stub for ever. A model that is not loaded does not matter."""
    manifest = {"spec": {"platform": OTHER}}
    (models / "chat/vllm_env.json").write_text(json.dumps(manifest))
    done = typed("serve", "--triton-root", root, "--model-repository", models, *named, "--", *PORTS)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{models}/chat: This model was built for {OTHER}, and this machine is {this_platform().name}." in done.stderr
    assert "Build it again with ./gen_vllm_env.sh here" in done.stderr
    done = typed("serve", "--triton-root", root, "--model-repository", models, "--model=vllm", "--", *PORTS)
    assert done.returncode == 7, done.stderr


def test_a_taken_port_is_named_before_the_model_loads(root: Path, models: Path) -> None:
    """tritonserver would load the model first, and then end."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 8000))
            probe.listen()
        except OSError:
            pass  # another program listens there
        done = typed("serve", "--triton-root", root, "--model-repository", models, "--", *PORTS[1:])
    assert done.returncode == 1
    assert "Port 8000 is taken." in done.stderr
    assert "serve -- --http-port=N" in done.stderr


def test_client_has_the_options_of_the_client(tmp_path: Path) -> None:
    """All of them, also those that the packager knows; its exit code and its messages are the client's own."""
    shown = typed("client", "--help")
    assert (shown.returncode, shown.stdout.partition(" ")[0]) == (0, "usage:")
    assert "--streaming-mode" in shown.stdout
    refused = typed("client", "--url", "127.0.0.1:9", "--results-file", tmp_path / "results.txt", "Hello")
    assert refused.returncode == 1
    assert "FAIL: vLLM example" in refused.stdout
    assert typed("client", "--modle", "vllm").returncode == 2
