"""A model folder of the official backend is adopted, and answers as our own does with the same arguments."""

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
from vllm_env.publish.adopt import read_adoption, stage_template
from vllm_env.publish.model_folder import BuiltSet
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


def answers(server: TritonServer, model: str) -> list[tuple[str, object]]:
    """What each request gets, one after the other, so that no batch is made up differently."""
    found: list[tuple[str, object]] = []
    for request in requests():
        (answer,) = ask_all(server, [request], model=model)
        assert not answer.error
        exact = {name: answer.values(name) for name in EXACT if "return_logprobs" in request}
        found.append((answer.text, exact))
    return found


def snapshot(folder: Path) -> dict[str, tuple[bytes, int, int, int]]:
    """The folder and all in it, with content, mode, time of change and number of names."""
    found = {}
    for path in (folder, *folder.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        names = status.st_nlink if path.is_file() else 0
        found[str(path.relative_to(folder))] = (content, stat.S_IMODE(status.st_mode), status.st_mtime_ns, names)
    return found


def official_model(folder: Path, engine: dict[str, Any]) -> Path:
    """Write a model folder of the official backend."""
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(CONFIG, encoding="utf-8")
    (folder / "1" / "model.json").write_text(json.dumps(engine), encoding="utf-8")
    return folder


def adopt(parts: Parts, source: Path, target: Path, folder: Path) -> None:
    """Do what the command does, but for the environment, which is served from where it is unpacked."""
    (folder / "environment").mkdir(parents=True)
    stub = parts.model / "triton_python_backend_stub"
    if not stub.exists():
        stub = parts.binary.parents[1] / "backends" / "python" / stub.name
    adoption = read_adoption(source, target, TEMPLATE, "vllm_env")
    template = stage_template(adoption, TEMPLATE, folder / "template")
    built = BuiltSet(stub, folder / "environment", LAYOUTS["directory"], "{}", "{}", adopted_from=source)
    publish(workspace_in(folder / "cache"), built, target.parent, target.name, template)


def test_an_adopted_model_answers_as_ours_does(
    parts: Parts, llama_server: TritonServer, made_models: MadeModels, tmp_path: Path, no_leftovers: None
) -> None:
    """The same answers, log probabilities too; Triton sees version 1 and what the user had written.

    Base model and one adapter are in the official folder, named from there, and are served from there.
    """
    source = tmp_path / "theirs" / "opt"
    shutil.copytree(made_models.llama, source / "weights")
    shutil.copytree(made_models.adapters[0], source / "adapters" / "one")
    names = {"one": "adapters/one", "two": str(made_models.adapters[1])}
    engine = {**CPU_ARGUMENTS, "model": "weights", "enable_prefix_caching": True, **LORA_ENGINE}

    expected = answers(llama_server, "vllm")
    assert len({text for text, _ in expected}) > len(FACTS)

    official_model(source, engine)
    (source / "1" / "multi_lora.json").write_text(json.dumps(names), encoding="utf-8")
    before = snapshot(source)
    model = tmp_path / "place" / "models" / "opt"
    adopt(parts, source, model, tmp_path / "made")
    assert not {path.name for path in model.iterdir()} & {"weights", "adapters"}
    assert not list(model.rglob("vllm_engine_args*"))
    config = model / "config.pbtxt"
    adopted = config.read_text(encoding="utf-8")
    config.write_text(adopted.replace("$$TRITON_MODEL_DIRECTORY/vllm_env", str(parts.environment)), encoding="utf-8")

    launch = Launch({**CPU_ENVIRONMENT, **ONE_THREAD}, (), READY_SECONDS, STALL_SECONDS)
    note_start(TRITON)
    with TritonServer(parts.binary, model.parent, log=tmp_path / "server.log", launch=launch) as server:
        assert answers(server, "opt") == expected
        (unknown,) = ask_all(server, [prompt(FACTS[0][0], {"lora_name": "three"})], model="opt")
        status, said = get(server.http_url, "/v2/models/opt/config")
        seen = json.loads(said)
        labels = read_metrics(f"http://127.0.0.1:{server.ports.metrics}/metrics").labels("vllm:")
        status, said = get(server.http_url, "/v2/models/opt")
    assert unknown.error == "LoRA three is not supported"  # and no names of others: there is no LORA_DIRECTORY here
    assert (seen["backend"], seen["version_policy"]) == ("python", {"specific": {"versions": [1]}})
    assert [(group["kind"], group["count"]) for group in seen["instance_group"]] == [("KIND_MODEL", 1)]
    assert {label["model"] for label in labels} == {"opt"}
    assert (status, json.loads(said)["versions"]) == (200, ["1"])
    assert snapshot(source) == before


@pytest.mark.skipif("VLLM_ENV_TEST_ENVIRONMENT" in os.environ, reason="serves an environment that was not built")
def test_the_command_serves_that_very_model_first(parts: Parts, disk_folder: Path, no_leftovers: None) -> None:
    """Weights in the official folder, named from there: they answer in the smoke run, and for the new model.

    The environment is in parts: what the smoke run has unpacked also serves afterwards, the engine's process too.
    """
    source = official_model(disk_folder / "theirs" / "opt", {**CPU_ARGUMENTS, "model": "weights"})
    shutil.copytree(parts.standin, source / "weights")
    before = snapshot(source)
    repository = disk_folder / "place" / "models"
    unpacked = {"VLLM_ENV_UNPACKED": str(disk_folder / "unpacked")}  # by the smoke run; the server finds it

    def run(*options: object) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "vllm_env", "adopt", str(source), *map(str, options)]
        environment = {**os.environ, **unpacked, "PYTHONPATH": str(CHECKOUT / "env")}
        return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=900)

    root = parts.binary.parents[1]
    done = run("--profile", "cpu", "--layout", "parts", "--triton-root", root, "--model-repository", repository)
    assert done.returncode == 0, done.stderr
    assert f"the smoke run serves {source / 'weights'} with the model's own engine arguments" in done.stderr
    assert "'The capital of France is' -> ' Paris, on the river Seine.'" in done.stdout
    launch = Launch({**CPU_ENVIRONMENT, **unpacked}, (), READY_SECONDS, STALL_SECONDS)
    note_start(TRITON)
    with TritonServer(parts.binary, repository, log=disk_folder / "server.log", launch=launch) as server:
        (answer,) = ask_all(server, [prompt(FACTS[2][0], {"temperature": 0, "max_tokens": 24})], model="opt")
        libraries, programs = libraries_of(server, "libtorch_cpu.so"), programs_of(server)
    assert answer.text == "".join(FACTS[2])
    (tree,) = (path for path in (disk_folder / "unpacked").iterdir() if path.is_dir())
    assert libraries == {str(tree / "lib/python3.11/site-packages/torch/lib/libtorch_cpu.so")}
    assert str(tree / "bin/python3.11") in programs  # of the engine
    assert not (repository / "opt" / "weights").exists()
    assert snapshot(source) == before
