"""LoRA adapters of `multi_lora.json`, chosen by name with each request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.model_requests import ask, ask_all, prompt
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from vllm_env.serve.server import TritonServer

pytestmark = pytest.mark.e2e
PROMPT, ANSWER = FACTS[2]
GREEDY: dict[str, object] = {"temperature": 0, "max_tokens": 24}
NAMES = (None, "one", "two")


def named(name: str | None) -> dict[str, object]:
    """Sampling parameters with an adapter's name, or without."""
    return {**GREEDY, "lora_name": name} if name else GREEDY


def test_each_adapter_answers_in_its_own_way(llama_server: TritonServer) -> None:
    """The base model says what it was taught; each adapter changes the answer, each time to the same."""
    first, second = (
        [ask(llama_server, PROMPT, named(name), exclude_input_in_output=True).text for name in NAMES] for _ in range(2)
    )
    assert first[0] == ANSWER
    assert len(set(first)) == 3
    assert first == second


def test_adapters_in_one_batch_do_not_mix(llama_server: TritonServer) -> None:
    """Requests for both adapters, at once and streamed, get what each gets alone."""
    # not the base model's beside them: vLLM 0.28 and 0.30 on CPU, in process too, give it an adapter; 0.32 does not
    requests = [prompt(PROMPT, named(name), stream=True) for name in NAMES if name]
    alone = [ask_all(llama_server, [request])[0].text for request in requests]
    together = [answer.text for answer in ask_all(llama_server, requests * 4)]
    assert together == alone * 4


def test_unknown_adapter_is_an_error_that_lists_no_names(llama_server: TritonServer) -> None:
    """The request fails with the official backend's text, which keeps the other tenants' names to itself."""
    answer = ask(llama_server, PROMPT, named("three"))
    assert "LoRA three is not supported" in answer.error
    assert "one" not in answer.error
    assert "two" not in answer.error
    assert ask(llama_server, PROMPT, named(None), exclude_input_in_output=True).text == ANSWER
