"""The lane without an engine is what it says: Triton, its stub and our code are real, torch and EngineCore are not there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.model_requests import STRANGE, ask, prompt
from support.triton_client import stream, text_of
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from vllm_env.serve.server import TritonServer

pytestmark = pytest.mark.e2e


def test_it_answers_as_the_standin_does(light_server: TritonServer) -> None:
    """With and without `--slow`, streamed and whole, to its end and to the limit."""
    for question, answer in FACTS:
        assert ask(light_server, question, {"temperature": 0, "max_tokens": 64}).text == question + answer
        request = prompt(question, {"temperature": 0, "max_tokens": 64}, stream=True)
        assert text_of(stream(light_server.grpc_url, [request])) == answer
    cut = ask(light_server, STRANGE[0], {"temperature": 0, "max_tokens": 7, "ignore_eos": True}, return_num_output_tokens=True)
    assert cut.values("num_output_tokens") == [[7]]
