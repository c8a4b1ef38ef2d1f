"""A repository of the official backend is adopted, answers as our own does with the same arguments, and is given back."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from support.mapped import libraries_of, programs_of
from support.metrics_page import read_metrics
from support.model_requests import ask_all, prompt
from support.models import LORA_ENGINE
from support.reference import ONE_THREAD
from support.repositories import CHECKOUT
from support.serving import CPU_ARGUMENTS, CPU_ENVIRONMENT, READY_SECONDS, STALL_SECONDS
from support.small_fixtures import workspace_in
from support.starts import TRITON, note_start
from support.triton_client import get
from vllm_env.layout import LAYOUTS
from vllm_env.plan import TEMPLATE
from vllm_env.publish.adopt import AdoptedSet, read_adoption, undo
from vllm_env.publish.publish import publish
from vllm_env.serve.server import Launch, TritonServer
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from pathlib import Path

    from support.models import MadeModels
    from support.serving import Parts

pytestmark = pytest.mark.e2e
CONFIG = """\
# The team's own; see the wiki.
backend: "vllm"

# The usage of device is deferred to the vLLM engine
instance_group [
  {
    count: 1
    kind: KIND_MODEL
  }
]
parameters { key: "REPORT_CUSTOM_METRICS" value: { string_value: "true" } } # for the dashboard
version_policy: { specific: { versions: [ 1 ] } }
"""
GREEDY = {"temperature": 0, "max_tokens": 24, "logprobs": 2}
EXACT = ("finish_reason", "num_input_tokens", "num_output_tokens", "cumulative_logprob", "logprobs")
RETURNED = {f"return_{name}": True for name in EXACT}


def requests() -> list[dict[str, Any]]:
    """Whole and streamed, greedy and with a seed, for the base model and both adapters."""
    found = []
    for name in (None, "one", "two"):
        adapter = {"lora_name": name} if name else {}
        for text, _ in FACTS:
            found.append(prompt(text, {**GREEDY, **adapter}, **RETURNED))
            found.append(prompt(text, {**GREEDY, **adapter}, stream=True))
            found.append(prompt(text, {"seed": 7, "temperature": 0.9, "max_tokens": 16, **adapter}, exclude_input_in_output=True))
    return found


def answers(server: TritonServer, model: str) -> list[object]:
    """What each request gets, one after the other, so that no batch is made up differently."""
    found: list[object] = []
    for request in requests():
        (answer,) = ask_all(server, [request], model=model)
        assert not answer.error
        exact = {name: answer.values(name) for name in EXACT if "return_logprobs" in request}
        found.append((answer.text, exact))
    return found


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file and folder below, with its mode."""
    return {
        str(path.relative_to(folder)): (path.read_bytes() if path.is_file() else b"", stat.S_IMODE(path.stat().st_mode))
        for path in folder.rglob("*")
    }


def built(parts: Parts, model: Path, folder: Path) -> AdoptedSet:
    """What a build would place, but for the environment, which is served from where it is unpacked."""
    (folder / "environment").mkdir(parents=True)
    stub = parts.model / "triton_python_backend_stub"
    if not stub.exists():
        stub = parts.binary.parents[1] / "backends" / "python" / stub.name
    return AdoptedSet(
        stub, folder / "environment", LAYOUTS["directory"], "{}", "{}", adoption=read_adoption(model, TEMPLATE, "vllm_env")
    )


def test_an_adopted_model_answers_as_ours_does_and_is_given_back(
    parts: Parts, llama_server: TritonServer, made_models: MadeModels, tmp_path: Path, no_leftovers: None
) -> None:
    """The same answers, log probabilities too; Triton sees version 1 and what the user had written; then all is as it was."""
    names = dict(zip(("one", "two"), map(str, made_models.adapters), strict=True))
    engine = {**CPU_ARGUMENTS, "model": str(made_models.llama), "enable_prefix_caching": True, **LORA_ENGINE}

    expected = answers(llama_server, "vllm")
    assert len({text for text, _ in expected}) > len(FACTS)  # type: ignore[misc]

    model = tmp_path / "place" / "models" / "opt"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(CONFIG, encoding="utf-8")
    (model / "1" / "model.json").write_text(json.dumps(engine), encoding="utf-8")
    (model / "1" / "multi_lora.json").write_text(json.dumps(names), encoding="utf-8")
    before = snapshot(model)
    workspace = workspace_in(tmp_path / "cache")
    publish(workspace, built(parts, model, tmp_path / "made"), model.parent, model.name, TEMPLATE)
    assert not list(model.rglob("vllm_engine_args*"))
    config = model / "config.pbtxt"
    adopted = config.read_text(encoding="utf-8")
    config.write_text(adopted.replace("$$TRITON_MODEL_DIRECTORY/vllm_env", str(parts.environment)), encoding="utf-8")

    launch = Launch({**CPU_ENVIRONMENT, **ONE_THREAD}, (), READY_SECONDS, STALL_SECONDS)
    assert (model / ".before_vllm_env").is_dir()
    note_start(TRITON)
    with TritonServer(parts.binary, model.parent, log=tmp_path / "server.log", launch=launch) as server:
        assert answers(server, "opt") == expected
        (unknown,) = ask_all(server, [prompt(FACTS[0][0], {"lora_name": "three"})], model="opt")
        status, said = get(server.http_url, "/v2/models/opt/config")
        seen = json.loads(said)
        labels = read_metrics(f"http://127.0.0.1:{server.ports.metrics}/metrics").labels("vllm:")
        status, said = get(server.http_url, "/v2/models/opt")
        log = server.log.read_text(errors="replace")
    assert unknown.error == "LoRA three is not supported"  # and no names of others: there is no LORA_DIRECTORY here
    assert (seen["backend"], seen["version_policy"]) == ("python", {"specific": {"versions": [1]}})
    assert [(group["kind"], group["count"]) for group in seen["instance_group"]] == [("KIND_MODEL", 1)]
    assert {label["model"] for label in labels} == {"opt"}
    assert (status, json.loads(said)["versions"]) == (200, ["1"])
    assert len([line for line in log.splitlines() if ".before_vllm_env" in line]) == 1

    config.write_text(adopted, encoding="utf-8")
    undo(workspace, model)
    assert snapshot(model) == before


@pytest.mark.skipif("VLLM_ENV_TEST_ENVIRONMENT" in os.environ, reason="serves an environment that was not built")
def test_the_command_serves_that_very_model_first(parts: Parts, disk_folder: Path, no_leftovers: None) -> None:
    """Weights in the model's own folder, named from there: they answer in the smoke run, and where the model stands.

    The environment is in parts: what the smoke run has unpacked also serves afterwards, the engine's process too.
    """
    model = disk_folder / "place" / "models" / "opt"
    (model / "1").mkdir(parents=True)
    shutil.copytree(parts.standin, model / "weights")
    (model / "config.pbtxt").write_text(CONFIG, encoding="utf-8")
    (model / "1" / "model.json").write_text(json.dumps({**CPU_ARGUMENTS, "model": "weights"}), encoding="utf-8")
    before = snapshot(model)
    unpacked = {"VLLM_ENV_UNPACKED": str(disk_folder / "unpacked")}  # by the smoke run; the server finds it

    def run(*options: object) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "vllm_env", "adopt", str(model), *map(str, options)]
        environment = {**os.environ, **unpacked, "PYTHONPATH": str(CHECKOUT / "env")}
        return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=900)

    done = run("--profile", "cpu", "--layout", "parts", "--triton-root", parts.binary.parents[1])
    assert done.returncode == 0, done.stderr
    assert f"the smoke run serves {model / 'weights'} with the model's own engine arguments" in done.stderr
    assert "'The capital of France is' -> ' Paris, on the river Seine.'" in done.stdout
    launch = Launch({**CPU_ENVIRONMENT, **unpacked}, (), READY_SECONDS, STALL_SECONDS)
    note_start(TRITON)
    with TritonServer(parts.binary, model.parent, log=disk_folder / "server.log", launch=launch) as server:
        (answer,) = ask_all(server, [prompt(FACTS[2][0], {"temperature": 0, "max_tokens": 24})], model="opt")
        libraries, programs = libraries_of(server, "libtorch_cpu.so"), programs_of(server)
    assert answer.text == "".join(FACTS[2])
    (tree,) = (path for path in (disk_folder / "unpacked").iterdir() if path.is_dir())
    assert libraries == {str(tree / "lib/python3.11/site-packages/torch/lib/libtorch_cpu.so")}
    assert str(tree / "bin/python3.11") in programs  # of the engine
    assert run("--undo").returncode == 0
    assert snapshot(model) == before
