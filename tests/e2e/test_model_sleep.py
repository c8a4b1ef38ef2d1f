"""A model with `enable_sleep_mode` gives the device's memory back while it sleeps, and answers as before once it is awake."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from support.instances import instances_asked, said, with_instances
from support.model_requests import Answer, ask_all, prompt
from support.patience import wait_for
from support.reference import ONE_THREAD
from support.settings import with_parameter
from support.triton_client import get, stream
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.models import MadeModels
    from support.serving import Serve
    from vllm_env.serve.server import TritonServer

pytestmark = [pytest.mark.e2e, pytest.mark.gpu]
GREEDY = {"temperature": 0, "max_tokens": 16}
MANY = 16  # requests of which each instance gets some, unless the machine is busy
CACHE_GB = 20
"""Of the KV cache: what a sleep frees cannot be mistaken for what other programs do on the device."""


@pytest.fixture(scope="module", params=[1, 2])
def count(request: pytest.FixtureRequest) -> int:
    """How many instances there are."""
    return int(request.param)


@pytest.fixture(scope="module")
def drowsy_server(serving: Serve, made_models: MadeModels, count: int) -> Iterator[TritonServer]:
    """A server that may sleep, with an adapter."""

    def prepare(model: Path) -> None:
        with_instances(model, count)
        with_parameter(model, "OPERATOR_REQUESTS", "sleep, wake_up, is_sleeping")
        (model / "multi_lora.json").write_text(json.dumps({"one": str(made_models.adapters[0])}), encoding="utf-8")

    engine = {"model": str(made_models.llama), "enable_lora": True, "max_lora_rank": 8, "enable_sleep_mode": True}
    engine |= {"kv_cache_memory_bytes": CACHE_GB << 30, "gpu_memory_utilization": 0.3, "enable_log_requests": True}
    engine["dtype"] = "float16"  # vLLM's kernels for adapters have no float32
    with serving(engine, environment=ONE_THREAD, prepare=prepare) as running:
        yield running


def used_gb() -> float:
    """Return how much memory of the first device is in use."""
    argv = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return float(subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout) / 1024


def operate(server: TritonServer, operation: str, **arguments: Any) -> Any:
    """Return what an operator is told, or the error's text."""
    request = {"operator_request": json.dumps({"operation": operation, **arguments})}
    answer = Answer(tuple(r for r in stream(server.grpc_url, [request]) if r.tensors or r.error))
    return answer.error or json.loads(answer.text)


def answers(server: TritonServer) -> list[str]:
    """Return what the model and its adapter say, or their errors; many requests get the same."""
    asked = [prompt(FACTS[2][0], {**GREEDY, **adapter}, exclude_input_in_output=True) for adapter in ({}, {"lora_name": "one"})]
    found = [{answer.error or answer.text for answer in ask_all(server, [one] * MANY)} for one in asked]
    assert [len(texts) for texts in found] == [1, 1], found
    return [text for (text,) in found]


def answers_of_all(server: TritonServer, count: int) -> list[str]:
    """Return what each instance answers."""
    start = len(said(server))
    found = answers(server)

    def all_have_answered() -> bool:
        assert answers(server) == found
        return len(instances_asked(server, start)) == count

    wait_for(all_have_answered, "an answer of each instance")
    return found


@pytest.mark.parametrize("level", [None, 1])
def test_a_sleep_frees_the_memory_and_nothing_is_lost(drowsy_server: TritonServer, count: int, level: int | None) -> None:
    """Weights, adapters and answers are the same afterwards; level 1 is the default where it is possible."""
    before = answers_of_all(drowsy_server, count)
    awake = used_gb()
    assert before[0] == FACTS[2][1] != before[1]
    arguments = {} if level is None else {"level": level}
    assert operate(drowsy_server, "sleep", **arguments) == {"operation": "sleep", "asleep": True}
    assert used_gb() < awake - 0.8 * CACHE_GB
    assert answers(drowsy_server) == ["the model is asleep; an operator request wakes it up"] * 2
    assert get(drowsy_server.http_url, "/v2/models/vllm/ready")[0] == 200
    assert operate(drowsy_server, "is_sleeping") == {"operation": "is_sleeping", "asleep": True}
    assert operate(drowsy_server, "wake_up") == {"operation": "wake_up", "asleep": False}
    assert used_gb() > awake - 0.2 * CACHE_GB
    assert answers_of_all(drowsy_server, count) == before
