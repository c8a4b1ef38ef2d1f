"""What gen_vllm_env.sh leaves, that stock tritonserver loads it, and that breaking any part of it is noticed."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.chaos_lab import STAGES
from support.repositories import point_to_environment, run_build
from support.serving import CPU_ARGUMENTS, CPU_ENVIRONMENT
from support.triton_client import generate, generate_stream
from vllm_env.base.errors import CommandError
from vllm_env.model.manifest import read_manifest
from vllm_env.serve.server import TritonServer

if TYPE_CHECKING:
    from support.serving import Parts, Serve

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif("VLLM_ENV_TEST_ENVIRONMENT" in os.environ, reason="serves an environment that was not built"),
]


def test_the_set_is_complete(built_repository: Path) -> None:
    """Archive, stub, manifest and SBOM lie there with the modes that the server needs, and the manifest describes them."""
    model = built_repository / "vllm"
    manifest = read_manifest(model)
    assert manifest is not None
    modes = {name: stat.S_IMODE((model / name).stat().st_mode) for name in ("vllm_env.tar.gz", manifest.stub.name)}
    assert modes == {"vllm_env.tar.gz": 0o644, "triton_python_backend_stub": 0o755}
    assert manifest.named.size == (model / "vllm_env.tar.gz").stat().st_size
    assert manifest.vllm.version == "0.32.0"
    assert manifest.versions["numpy"].startswith("1.")
    assert not list(built_repository.parent.glob(".vllm_env*"))


def test_nothing_changed_nothing_built(built_repository: Path) -> None:
    """The same command again says that nothing was to be built, begins no stage, and touches no file."""
    before = {f.name: f.stat().st_mtime_ns for f in (built_repository / "vllm").iterdir()}
    done = run_build("--no-smoke-run", "--model-repository", str(built_repository))
    assert done.returncode == 0, done.stderr
    assert "nothing to build" in done.stderr
    assert not [line for line in done.stderr.splitlines() if line.startswith(STAGES[1:])]
    assert {f.name: f.stat().st_mtime_ns for f in (built_repository / "vllm").iterdir()} == before


@pytest.mark.slow
def test_warm_keeps_the_caches(parts: Parts, disk_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own arguments are loaded, also when nothing had to be built, and a build without --warm keeps them."""
    options = ("--no-smoke-run", "--model-repository", str(disk_folder / "models"))
    assert run_build(*options).returncode == 0
    model = disk_folder / "models" / "vllm"
    arguments = {**CPU_ARGUMENTS, "model": str(parts.standin), "enforce_eager": False}
    (model / "vllm_engine_args.json").write_text(json.dumps(arguments))
    for name, value in CPU_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    done = run_build(*options, "--warm", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["rebuilt"], result["warm"]["folder"]) == (False, str(model / "vllm_cache"))
    assert list((model / "vllm_cache").rglob("*.so"))
    record = json.loads((model / "vllm_cache" / "warm.json").read_text())
    assert record["environment"] == result["manifest"]["lock_digest"]
    assert run_build(*options, "--layout", "directory").returncode == 0  # places the model's folder anew
    assert json.loads((model / "vllm_cache" / "warm.json").read_text()) == record


@pytest.mark.slow  # the build has made the same checks; test_parts.py has the subcommand
def test_verify_accepts_what_was_built_at_any_place(built_repository: Path, disk_folder: Path) -> None:
    """The subcommand runs the build's checks on the published set; a plain copy of the folder elsewhere is as good."""
    copy = disk_folder / "elsewhere" / "vllm"
    shutil.copytree(built_repository / "vllm", copy, copy_function=os.link)
    done = run_build("verify", "--model-repository", str(copy.parent))
    assert done.returncode == 0, done.stderr
    assert "verified" in done.stdout


def test_http_generate(server: TritonServer) -> None:
    """The whole answer by HTTP, echoing the prompt as the official backend does."""
    request = {"text_input": "The capital of France is", "parameters": {"temperature": 0, "max_tokens": 16}}
    status, answer = generate(server.http_url, request)
    assert (status, answer["text_output"]) == (200, "The capital of France is Paris, on the river Seine.")


def test_http_generate_stream(server: TritonServer) -> None:
    """The same answer in events; how many, when the sender wakes too late for some, is a matter of test_model_contract.py."""
    request = {"text_input": "The capital of France is", "stream": True, "temperature": 0, "max_tokens": 16}
    status, events = generate_stream(server.http_url, request)
    assert status == 200
    assert "".join(event["text_output"] for event in events) == " Paris, on the river Seine."


@pytest.mark.parametrize("part", ["stub", "archive"])
def test_a_broken_part_is_noticed(serving: Serve, parts: Parts, tmp_path: Path, part: str, no_leftovers: None) -> None:
    """With the stub or the archive broken on purpose, the server does not get ready; test_failing_loads.py breaks model.py.

    Triton waits for ever for a stub that cannot start; twice the time of a good start is enough to tell.
    """

    def spoil(model: Path) -> None:
        name = {"stub": "triton_python_backend_stub", "archive": "vllm_env.tar.gz"}[part]
        data = (parts.model / name).read_bytes()
        (model / name).write_bytes(data[: len(data) // 2])
        (model / name).chmod(0o755)
        if part == "archive":
            point_to_environment(model, Path("$$TRITON_MODEL_DIRECTORY", name))

    with pytest.raises(CommandError), serving(as_built=part == "archive", prepare=spoil, ready_timeout=75):
        pass


def test_published_arguments_are_not_touched(built_repository: Path) -> None:
    """The smoke run serves another model, but the published engine arguments stay the tutorial's."""
    arguments = json.loads((built_repository / "vllm" / "vllm_engine_args.json").read_text())
    assert arguments["model"] == "facebook/opt-125m"
    assert arguments["disable_log_requests"] == "true"
