"""vLLM's own OpenAI server over engines that have adapters, sleep, pool, or have several front ends."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from support.model_requests import ask
from support.settings import openai_url
from support.triton_client import generate, get, post, stream
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from vllm_env.serve.server import TritonServer

pytestmark = pytest.mark.e2e
PROMPT, _ = FACTS[2]
GREEDY = {"temperature": 0, "max_tokens": 24}
TEXT = "/v1/completions"


def test_an_adapter_is_a_model(llama_server: TritonServer) -> None:
    """Under its name, with the answers that Triton's requests for it get; vLLM's own number and path of it are not known."""
    url = openai_url(llama_server)
    texts = {}
    for name in ("vllm", "one", "two"):
        status, text = post(url, TEXT, {**GREEDY, "model": name, "prompt": PROMPT}, timeout=300)
        answer = json.loads(text)
        assert (status, answer["model"]) == (200, name), text
        texts[name] = answer["choices"][0]["text"]
        chosen = GREEDY if name == "vllm" else {**GREEDY, "lora_name": name}
        assert texts[name] == ask(llama_server, PROMPT, chosen, exclude_input_in_output=True).text
    assert len(set(texts.values())) == 3
    listed = {model["id"]: model["root"] for model in json.loads(get(url, "/v1/models")[1])["data"]}
    assert listed.items() >= {"vllm": "vllm", "one": "one", "two": "two", "fixed": "fixed"}.items()
    for name in ("three", "../one", ""):
        status, text = post(url, TEXT, {**GREEDY, "model": name, "prompt": PROMPT}, timeout=300)
        assert status == (404 if name else 200), text


def test_a_sleeping_model_refuses_on_both_apis(llama_server: TritonServer) -> None:
    """Triton's operator puts it to sleep and wakes it up."""
    url = openai_url(llama_server)
    assert generate(llama_server.http_url, {"operator_request": '{"operation": "sleep"}'})[0] == 200
    status, text = post(url, TEXT, {**GREEDY, "model": "vllm", "prompt": PROMPT}, timeout=300)
    assert (status, json.loads(text)["error"]["message"]) == (503, "the model is asleep; an operator request wakes it up")
    assert get(url, "/v1/models")[0] == 200
    assert generate(llama_server.http_url, {"operator_request": '{"operation": "wake_up"}'})[0] == 200
    assert post(url, TEXT, {**GREEDY, "model": "vllm", "prompt": PROMPT}, timeout=300)[0] == 200


def test_embeddings_and_ranks(embedding_server: TritonServer) -> None:
    """The numbers are those that Triton's requests get."""
    url = openai_url(embedding_server)
    status, text = post(url, "/v1/embeddings", {"model": "vllm", "input": [PROMPT, "x"]}, timeout=300)
    assert status == 200, text
    first, second = (item["embedding"] for item in json.loads(text)["data"])
    (answer, *_) = stream(embedding_server.grpc_url, [{"embedding_request": json.dumps({"input": PROMPT})}])
    assert first == pytest.approx(json.loads(answer.text()), abs=1e-5)
    assert first != second
    cut = {"model": "vllm", "input": "word " * 500, "truncate_prompt_tokens": 20}
    status, text = post(url, "/v1/embeddings", cut, timeout=300)
    assert (status, json.loads(text)["usage"]["prompt_tokens"]) == (200, 20), text
    ranked = {"model": "vllm", "query": PROMPT, "documents": ["x", PROMPT], "return_documents": True}
    status, text = post(url, "/rerank", ranked, timeout=300)
    assert status == 200, text
    assert [item["index"] for item in json.loads(text)["results"]] == [1, 0]
    status, text = post(url, TEXT, {"model": "vllm", "prompt": "x"}, timeout=300)
    assert status == 404, text
