"""The official backend's behaviour where its parameters are not set: no metrics, no adapters, no health check.

The model's tokenizer puts a token before each text, as Llama's and Gemma's do, and an ensemble stands before it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tritonclient.grpc as grpcclient

from support.model_requests import ask
from support.patience import wait_for, wait_for_line
from support.reference import ONE_THREAD
from support.repositories import serves_since
from support.server_processes import engines
from support.settings import with_parameter
from support.triton_client import get
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.models import MadeModels
    from support.serving import Serve
    from vllm_env.serve.server import TritonServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]  # test_official_backend.py has what most operators choose
PROMPT, _ = FACTS[2]
GREEDY = {"temperature": "0"}
ENSEMBLE = """
name: "before"
platform: "ensemble"
input [
  { name: "question" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "chosen" data_type: TYPE_STRING dims: [ 1 ] }
]
output [ { name: "answer" data_type: TYPE_STRING dims: [ -1 ] } ]
ensemble_scheduling {
  step [
    {
      model_name: "vllm"
      model_version: -1
      input_map { key: "text_input" value: "question" }
      input_map { key: "sampling_parameters" value: "chosen" }
      output_map { key: "text_output" value: "answer" }
    }
  ]
}
"""


def with_first_token(model: Path, folder: Path) -> Path:
    """Copy a model; its tokenizer begins each text with the end token."""
    shutil.copytree(model, folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    first, text = {"SpecialToken": {"id": "</s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    (number,) = [token["id"] for token in tokenizer["added_tokens"] if token["content"] == "</s>"]
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"</s>": {"id": "</s>", "ids": [number], "tokens": ["</s>"]}},
    }
    path.write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture(scope="module")
def official(serving: Serve, made_models: MadeModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server with the official backend's behaviour and, but for the health check's, none of its parameters."""

    def prepare(model: Path) -> None:
        with_parameter(model, "COMPATIBILITY", "official")
        with_parameter(model, "ENABLE_VLLM_HEALTH_CHECK", "false")
        before = model.parent / "before"
        (before / "1").mkdir(parents=True)
        (before / "config.pbtxt").write_text(ENSEMBLE)

    made = with_first_token(made_models.llama, tmp_path_factory.mktemp("first") / "model")
    control = ("--model-control-mode=explicit", "--load-model=before")  # which loads what it is made of
    engine = {"model": str(made), "enable_lora": "false"}
    with serving(engine, environment=ONE_THREAD, prepare=prepare, arguments=control) as running:
        yield running


def test_metrics_are_reported_only_if_they_are_asked_for(official: TritonServer) -> None:
    """By REPORT_CUSTOM_METRICS, whose default is false."""
    assert ask(official, PROMPT, GREEDY).error == ""
    assert "vllm:" not in get(f"http://127.0.0.1:{official.ports.metrics}", "/metrics")[1]


def test_an_empty_prompt_is_answered_where_the_tokenizer_begins_it(official: TritonServer) -> None:
    """The one token that is there before each text is enough for vLLM."""
    answer = ask(official, "", {**GREEDY, "ignore_eos": True}, return_num_input_tokens=True, return_num_output_tokens=True)
    assert answer.error == ""
    assert answer.values("num_input_tokens") == [[1]]
    assert answer.values("num_output_tokens") == [[16]]


def test_an_adapter_without_lora_is_refused_in_its_words(official: TritonServer) -> None:
    """`enable_lora` may be a text in its own files; the text of the error stands alone."""
    assert ask(official, PROMPT, {**GREEDY, "lora_name": "doll"}).error == "LoRA feature is not enabled."
    wait_for_line(official, "[vllm] LoRA is not enabled, please restart the backend with LoRA enabled.")


def test_an_ensemble_has_the_models_answer(official: TritonServer) -> None:
    """Its steps send tensors alone."""
    with grpcclient.InferenceServerClient(official.grpc_url) as client:
        assert client.is_model_ready("before")
    whole = ask(official, None, question=PROMPT, chosen=json.dumps(GREEDY), options={"model": "before"})
    assert whole.error == ""
    assert [bytes(v) for v in whole.values("answer")[0]] == [ask(official, PROMPT, GREEDY).text.encode()]


def test_without_the_health_check_a_dead_engine_stays_and_so_does_the_model(official: TritonServer) -> None:
    """Each request gets an error; nothing is unloaded, nothing is started again. Triton asks the model since 26.03."""
    for process in engines(official):
        process.kill()
    wait_for(lambda: ask(official, PROMPT, GREEDY).error, "the engine's end")
    for _ in range(3):
        assert ask(official, PROMPT, GREEDY).error
    with grpcclient.InferenceServerClient(official.grpc_url) as client:
        assert client.is_model_ready("vllm") != serves_since("26.03")
    assert "model will be unloaded" not in official.log.read_text(errors="replace")
