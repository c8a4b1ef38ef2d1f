"""tritonclient's four forms, used as its users use them, get what vLLM's own server says; then an unload ends."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from clients import standin
from clients.lane import HERE
from support.model_control import unload
from support.patience import wait_for
from support.server_processes import engines, stubs
from support.triton_client import generate, post

if TYPE_CHECKING:
    from clients.lane import Clients, Lane

pytestmark = pytest.mark.e2e
CALLS = re.findall(r"^@call\ndef (\w+)", (HERE / "tritonclients.py").read_text("utf-8"), re.MULTILINE)
SAYS = dict(standin.FACTS)[standin.PROMPT]
DECOUPLED = "doesn't support models with decoupled transaction policy"
"""Triton's own words."""
EXPECTED: dict[str, Any] = {
    "grpc_whole": standin.PROMPT + SAYS,
    "grpc_streamed": {"text": SAYS, "pieces": True},
    "grpc_aio_streams_left": [SAYS],
    "grpc_aio_tools": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
    **dict.fromkeys(("grpc_looks", "grpc_aio_looks", "http_looks", "http_aio_looks"), True),
}
REFUSED = {
    **dict.fromkeys(("grpc_infer", "http_infer", "http_aio_infer"), DECOUPLED),
    "grpc_refused": "max_tokens",
}


@pytest.fixture(scope="module")
def answers(clients: Clients, lane: Lane, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each call got."""
    urls = (url.partition("://")[2] or url for url in (lane.triton.http_url, lane.triton.grpc_url))
    return clients.run("tritonclients.py", *urls, home=tmp_path_factory.mktemp("tritonclient"))


@pytest.mark.parametrize("name", CALLS)
def test_a_call_gets_its_answer(answers: dict[str, Any], name: str) -> None:
    """A text, or Triton's refusal in its words."""
    answer = answers[name]
    if name in REFUSED:
        assert REFUSED[name] in answer.get("message", ""), answer
    else:
        assert answer.get("answer") == EXPECTED[name], answer


def test_vllms_server_says_the_same(lane: Lane) -> None:
    """As does Triton's generate endpoint."""
    request = {"max_tokens": 16, "temperature": 0}
    status, body = post(lane.theirs, "/v1/completions", {"model": "vllm", "prompt": standin.PROMPT, **request}, timeout=300)
    assert (status, json.loads(body)["choices"][0]["text"]) == (200, SAYS)
    status, answer = generate(lane.triton.http_url, {"text_input": standin.PROMPT, **request})
    assert (status, answer["text_output"]) == (200, standin.PROMPT + SAYS)


@pytest.mark.ends_server
def test_an_unload_ends_after_streams_were_left(answers: dict[str, Any], lane: Lane) -> None:
    """Clients leave at the final flag; the model goes all the same."""
    assert answers["grpc_aio_streams_left"]["status"] == 200
    status, said = unload(lane.triton)
    assert status == 200, said
    wait_for(lambda: not engines(lane.triton) and not stubs(lane.triton), "the end of the model's processes")
