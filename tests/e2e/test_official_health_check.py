"""The official backend's test of its health check, rebuilt: vLLM's `check_health` fails from its second call on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.model_requests import ask
from support.patience import wait_for, wait_for_line
from support.reference import ONE_THREAD
from support.settings import with_line, with_parameter
from support.triton_client import is_ready
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from pathlib import Path

    from support.serving import Serve

pytestmark = pytest.mark.e2e
PROMPT, ANSWER = FACTS[2]
GREEDY = {"temperature": "0"}
DEAD = "Model is unavailable due to unhealthy vLLM engine"
UNKNOWN = "Request for unknown model: 'vllm' has no available versions"
CONTROL = ("--model-control-mode=explicit", "--load-model=*")
MOCK = """
from vllm.v1.engine.async_llm import AsyncLLM

calls = []

async def check_health(self):
    calls.append(self)
    if len(calls) > 1:
        raise RuntimeError("Simulated vLLM check_health() failure")

AsyncLLM.check_health = check_health
"""


def prepare(model: Path, *, mocked: bool, parameters: dict[str, str]) -> None:
    """Set parameters; replace vLLM's check where the model is initialized, which is the first place that may import vLLM."""
    for name, value in parameters.items():
        with_parameter(model, name, value)
    if not mocked:
        return
    (model / "1" / "mock_check_health.py").write_text(MOCK, encoding="utf-8")
    with_line(model, "            import mock_check_health", after="            self._service = Service(args)")


@pytest.mark.parametrize("given", [pytest.param({}, marks=pytest.mark.slow), {"ENABLE_VLLM_HEALTH_CHECK": "false"}])
def test_without_the_health_check_vllms_is_not_asked(light_serving: Serve, given: dict[str, str]) -> None:
    """Three requests are answered, though the check would fail."""
    parameters = {"COMPATIBILITY": "official", **given}
    options = {"environment": ONE_THREAD, "arguments": CONTROL}
    with light_serving(prepare=lambda model: prepare(model, mocked=True, parameters=parameters), **options) as server:
        for _ in range(3):
            assert is_ready(server.grpc_url)
            assert ask(server, PROMPT, GREEDY, stream=True).text == ANSWER
        assert is_ready(server.grpc_url)


@pytest.mark.parametrize(
    ("mocked", "compatibility"), [pytest.param(False, "official", marks=pytest.mark.slow), (True, "official"), (True, "")]
)
def test_the_health_check_asks_vllms_before_each_request(light_serving: Serve, mocked: bool, compatibility: str) -> None:
    """Where it fails the request is refused and the model unloaded; where it does not, all are answered."""
    parameters = {"COMPATIBILITY": compatibility, "ENABLE_VLLM_HEALTH_CHECK": "true"}
    options = {"environment": ONE_THREAD, "arguments": CONTROL}
    with light_serving(prepare=lambda model: prepare(model, mocked=mocked, parameters=parameters), **options) as server:
        assert is_ready(server.grpc_url)
        assert ask(server, PROMPT, GREEDY, stream=True).text == ANSWER
        assert is_ready(server.grpc_url)
        answer = ask(server, PROMPT, GREEDY, stream=True)
        if not mocked:
            assert answer.text == ANSWER
            assert ask(server, PROMPT, GREEDY, stream=True).text == ANSWER
            assert is_ready(server.grpc_url)
            return
        assert answer.error == DEAD
        assert len(answer.responses) == 1
        wait_for(lambda: not is_ready(server.grpc_url), "the model's end")
        assert ask(server, PROMPT, GREEDY, stream=True).error == UNKNOWN
        wait_for_line(server, "[vllm] Engine is not healthy and model will be unloaded")
        assert "Simulated vLLM check_health() failure" in server.log.read_text(errors="replace")
