"""What a request may ask for beside an answer: its own part of the prefix cache, a trace, fields for the engine, operations."""

from __future__ import annotations

import http.client
import json
import queue
import shutil
import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
import tritonclient.grpc as grpcclient

from support.metrics_page import read_metrics
from support.model_requests import Answer, ask, ask_all, prompt
from support.models import CHAT_FACTS
from support.patience import pause, wait_for
from support.serving import is_cuda
from support.triton_client import stream, tensor
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from pathlib import Path

    from support.models import MadeModels
    from support.serving import Parts
    from support.trace_collector import Collector
    from vllm_env.serve.server import TritonServer

pytestmark = pytest.mark.e2e
QUESTION, FACT = FACTS[2]
LONG = f"{QUESTION} {FACT}. " * 6 + QUESTION  # several blocks of the prefix cache
GREEDY = {"temperature": 0, "max_tokens": 12}
PROMISED = 120.0  # s


def operate(server: TritonServer, operation: str, **arguments: Any) -> Any:
    """Return what an operator is told, or the error's text."""
    request = {"operator_request": json.dumps({"operation": operation, **arguments})}
    found = stream(server.grpc_url, [request])
    answer = Answer(tuple(r for r in found if r.tensors or r.error))
    return answer.error or json.loads(answer.text)


def read_hits(server: TritonServer) -> float:
    """Return how many tokens vLLM has taken from its prefix cache, as of the last second or so."""
    page = read_metrics(f"http://127.0.0.1:{server.ports.metrics}/metrics")
    return page.total("vllm:prefix_cache_hits_total") + page.total("vllm:prefix_cache_hits")


def hits(server: TritonServer) -> float:
    """Return `read_hits` once it stands still: metrics come once a second, later on a busy machine."""
    seen = [-1.0, -2.0, -3.0]
    while len(set(seen[-3:])) > 1:
        pause(2)
        seen.append(read_hits(server))
    return seen[-1]


def test_two_salts_share_no_prefix(llama_server: TritonServer) -> None:
    """Each finds its own prefixes only, and so do requests without; the answers are the same."""
    salted = [{**GREEDY, "cache_salt": salt} for salt in ("tenant-a", "tenant-b")]
    first = ask(llama_server, LONG, GREEDY, exclude_input_in_output=True).text
    before = hits(llama_server)
    assert [ask(llama_server, LONG, values, exclude_input_in_output=True).text for values in salted] == [first, first]
    assert hits(llama_server) == before
    ask(llama_server, LONG, salted[1])
    wait_for(lambda: read_hits(llama_server) > before)


def test_an_operator_resets_the_prefix_cache(llama_server: TritonServer) -> None:
    """What was cached is computed again."""
    for _ in range(2):
        ask(llama_server, LONG, GREEDY)
    before = hits(llama_server)
    assert operate(llama_server, "reset_prefix_cache") == {"operation": "reset_prefix_cache", "reset": True}
    ask(llama_server, LONG, GREEDY)
    assert hits(llama_server) == before
    ask(llama_server, LONG, GREEDY)
    wait_for(lambda: read_hits(llama_server) > before)


def test_a_sleeping_model_refuses_at_once_and_wakes_up(llama_server: TritonServer) -> None:
    """Requests in flight end first; on CPU it only pauses, and says that it cannot free memory."""
    answers: list[Answer] = []
    requests = [prompt(QUESTION, {**GREEDY, "max_tokens": 150, "ignore_eos": True}, stream=True)] * 4
    flight = threading.Thread(target=lambda: answers.extend(ask_all(llama_server, requests)))
    flight.start()
    assert operate(llama_server, "sleep") == {"operation": "sleep", "asleep": True}
    flight.join()
    assert len(answers) == 4
    assert all(not a.error or "asleep" in a.error for a in answers)
    assert operate(llama_server, "is_sleeping") == {"operation": "is_sleeping", "asleep": True}
    assert ask(llama_server, QUESTION, GREEDY).error == "the model is asleep; an operator request wakes it up"
    assert operate(llama_server, "load_lora", name="a") == "the model is asleep; an operator request wakes it up"
    assert operate(llama_server, "wake_up") == {"operation": "wake_up", "asleep": False}
    assert ask(llama_server, QUESTION, GREEDY, exclude_input_in_output=True).text == FACT
    assert "enable_sleep_mode is not set" in operate(llama_server, "sleep", level=1)
    assert operate(llama_server, "is_sleeping") == {"operation": "is_sleeping", "asleep": False}


def test_an_adapter_is_loaded_ahead(llama_server: TritonServer, made_models: MadeModels, lora_directory: Path) -> None:
    """At an operator's request, also in place of the one before, at once."""
    assert operate(llama_server, "load_lora", name="ahead") == "LoRA ahead is not supported"
    versions = []
    for adapter in made_models.adapters:
        shutil.rmtree(lora_directory / "ahead", ignore_errors=True)
        shutil.copytree(adapter, lora_directory / "ahead")
        told = operate(llama_server, "load_lora", name="ahead")
        versions.append(told.pop("version"))
        assert told == {"operation": "load_lora", "name": "ahead"}
    assert versions[0] != versions[1]
    name = versions[1]
    assert name.startswith("ahead@")
    assert ask(llama_server, QUESTION, {**GREEDY, "lora_name": "ahead"}, exclude_input_in_output=True).text != FACT
    page = f"http://127.0.0.1:{llama_server.ports.metrics}/metrics"
    wait_for(
        lambda: any(name in value for used in read_metrics(page).labels("vllm:lora_requests_info") for value in used.values())
    )
    shutil.rmtree(lora_directory / "ahead")


def test_fields_for_the_engine_reach_it(llama_server: TritonServer) -> None:
    """vLLM knows them: what it cannot do with them it says, and what comes from a prefill is told."""
    fields = {"extra_args": {"x": 1}, "kv_transfer_params": {"do_remote_decode": False}, "data_parallel_rank": 0}
    answer = ask(llama_server, QUESTION, {**GREEDY, **fields}, exclude_input_in_output=True, return_kv_transfer_params=True)
    assert answer.text == FACT
    assert answer.values("kv_transfer_params") == [[b"null"]]
    assert "data_parallel_rank" in ask(llama_server, QUESTION, {**GREEDY, "data_parallel_rank": 7}).error
    session = ask(llama_server, QUESTION, {**GREEDY, "session_id": "s"}, exclude_input_in_output=True)
    assert session.error == "sampling parameter 'session_id': this vLLM does not have it" or session.text == FACT


def test_a_trace_goes_on_in_vllm(chat_server: TritonServer, collector: Collector) -> None:
    """The spans of Triton and of vLLM are of the trace that the client has begun."""
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    connection = http.client.HTTPConnection(urlsplit(chat_server.http_url).netloc, timeout=PROMISED)
    headers = {"Content-Type": "application/json", "traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    question, fact = CHAT_FACTS[-1]
    asked = {"text_input": question, "parameters": {"temperature": 0, "max_tokens": 64}}
    connection.request("POST", "/v2/models/vllm/generate", json.dumps(asked), headers)
    answer = connection.getresponse()
    assert (answer.status, fact in json.loads(answer.read())["text_output"]) == (200, True)
    connection.close()
    wait_for(lambda: collector.has("/triton", trace_id))
    wait_for(lambda: collector.has("/vllm", trace_id))


def test_a_forwarded_header_is_a_trace_as_well(llama_server: TritonServer, collector: Collector) -> None:
    """Of gRPC, where the server has no traces of its own."""
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    found: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(llama_server.grpc_url) as client:
        client.start_stream(lambda result, error: found.put(error), headers={"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"})
        client.async_stream_infer("vllm", [tensor("text_input", QUESTION)], parameters=GREEDY)
        assert found.get(timeout=PROMISED) is None
        client.stop_stream()
    wait_for(lambda: collector.has("/vllm", trace_id))
    assert not collector.has("/triton", trace_id)


def test_a_seed_holds_however_many_steps_a_prompt_takes(chat_server: TritonServer) -> None:
    """Alone and beside others, with which it shares the steps; on a CPU this once ended the engine."""
    drawn = {"seed": 1, "temperature": 1, "top_p": 0.9, "max_tokens": 12, "ignore_eos": True}
    request = prompt(LONG, drawn, exclude_input_in_output=True, return_num_input_tokens=True)
    (alone,) = ask_all(chat_server, [request])
    assert alone.error == ""
    assert alone.values("num_input_tokens")[0][0] > 48
    others = [prompt(f"{number} {LONG}", {**drawn, "seed": number}) for number in range(5)]
    answers = ask_all(chat_server, [*others, request, request])
    assert [answer.error for answer in answers] == [""] * 7
    assert [answer.text for answer in answers[-2:]] == [alone.text] * 2
    hot = [prompt(LONG, {**drawn, "seed": seed, "temperature": 2}, exclude_input_in_output=True) for seed in range(6)]
    assert len({answer.text for answer in ask_all(chat_server, hot)}) > 1


def test_log_probabilities_of_the_prompt_beside_adapters(llama_server: TritonServer, parts: Parts) -> None:
    """vLLM's CPU build would end with the request; one for CUDA has them, and of all prompts at once."""
    request = prompt(QUESTION, {"max_tokens": 3, "prompt_logprobs": 0, "n": 2}, return_prompt_logprobs=True)
    answers = ask_all(llama_server, [request] * 3)
    if is_cuda(parts.environment):
        assert all(json.loads(answer.values("prompt_logprobs")[0][0]) for answer in answers)
    else:
        wrong = "prompt_logprobs: vLLM on a CPU cannot compute them for a model with enable_lora"
        assert [answer.error for answer in answers] == [wrong] * 3
    assert ask(llama_server, QUESTION, GREEDY, exclude_input_in_output=True).text == FACT
