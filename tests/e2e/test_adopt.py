"""A model folder of the official backend is adopted, and answers as our own does with the same arguments."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from support.metrics_page import read_metrics
from support.model_requests import ask_all, prompt
from support.models import LORA_ENGINE
from support.official_folder import snapshot
from support.reference import ONE_THREAD
from support.serving import CPU_ARGUMENTS, CPU_ENVIRONMENT, READY_SECONDS, STALL_SECONDS
from support.small_fixtures import workspace_in
from support.starts import TRITON, note_start
from support.triton_client import get
from vllm_env.base.workspace import TEMPLATE
from vllm_env.layout.layouts import LAYOUTS
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


@pytest.mark.slow  # test_parts.py has adopt's own smoke run
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

    (source / "1").mkdir()
    (source / "config.pbtxt").write_text(CONFIG, encoding="utf-8")
    (source / "1" / "model.json").write_text(json.dumps(engine), encoding="utf-8")
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
