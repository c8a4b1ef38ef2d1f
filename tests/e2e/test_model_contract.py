"""The tensors of the official vLLM backend, request by request, on the real server."""

from __future__ import annotations

import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from support.model_requests import STRANGE, ask, ask_all, prompt
from support.pages import requests_in
from support.repositories import serves_since
from support.triton_client import generate, generate_stream, post, stream
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from vllm_env.serve.server import TritonServer

pytestmark = pytest.mark.e2e
PROMPT, ANSWER = FACTS[2]
CHECKOUT = Path(__file__).parents[2]
GREEDY = {"temperature": 0, "max_tokens": 64}


def test_whole_answer_is_one_response_with_the_prompt_before_it(server: TritonServer) -> None:
    """Without `stream` and `exclude_input_in_output` there is one response of shape [1]: prompt and completion."""
    answer = ask(server, PROMPT, GREEDY)
    assert [r.tensors["text_output"].shape for r in answer.responses] == [(1,)]
    assert answer.text == PROMPT + ANSWER


def test_no_package_comes_from_where_the_server_was_started(server: TritonServer) -> None:
    """There are folders with the names of packages, all but one of which end the program that imports them."""
    beside = Path(f"/proc/{server.pid}/cwd").resolve()
    assert {path.name for path in beside.iterdir()} == {"triton", "vllm", "torch", "transformers"}
    assert ask(server, PROMPT, GREEDY, exclude_input_in_output=True).text == ANSWER


def test_streamed_answer_is_one_token_a_response_without_the_prompt(server: TritonServer) -> None:
    """A lone streaming request gets each token by itself, as the official backend sends them."""
    most, until = 0, time.monotonic() + 300
    while most < 36 and time.monotonic() < until:  # a machine busy with other work wakes the sender late, and it merges
        parameters = {**GREEDY, "ignore_eos": True, "max_tokens": 40}
        answer = ask(server, PROMPT, parameters, stream=True, return_token_ids=True)
        counts = [len(part) for part in answer.values("token_ids")]
        assert sum(counts) == 40
        assert answer.text.startswith(ANSWER)
        most = max(most, counts.count(1))
    assert most >= 36


@pytest.mark.parametrize("streaming", [False, True])
def test_every_request_gets_exactly_one_final_response(server: TritonServer, streaming: bool) -> None:
    """Good requests and bad ones all end once, so no client waits for ever and no response comes after the end.

    An error comes without its request's id. Before 26.04 it is final itself; since then the empty final response follows it.
    """
    requests = [prompt(PROMPT, GREEDY, stream=streaming), prompt(PROMPT, "{", stream=streaming)] * 4
    responses = stream(server.grpc_url, requests)
    assert sum(bool(response.error) for response in responses) == 4
    ids = "01234567" if serves_since("26.04") else "0246"
    assert Counter(response.request_id for response in responses if response.final) == dict.fromkeys(ids, 1)


def test_http_generate_takes_parameters_in_every_place(server: TritonServer) -> None:
    """Request parameters at the top, under `parameters`, and the JSON tensor mean the same; so does a request with an id."""
    wanted = {"temperature": 0, "max_tokens": 3}
    ways: list[dict[str, Any]] = [
        {"text_input": PROMPT, **wanted},
        {"text_input": PROMPT, "parameters": wanted},
        {"id": "42", "text_input": PROMPT, "parameters": wanted},
        {"text_input": PROMPT, "sampling_parameters": json.dumps(wanted)},
        {"text_input": PROMPT, "sampling_parameters": json.dumps({**wanted, "max_tokens": "3", "temperature": "0"})},
    ]
    answers = [generate(server.http_url, {**way, "exclude_input_in_output": True}) for way in ways]
    assert [status for status, _ in answers] == [200] * len(ways)
    texts = {body["text_output"] for _, body in answers}
    assert len(texts) == 1
    assert ANSWER.startswith(texts.pop())


def test_sampling_parameters_tensor_wins_over_request_parameters(server: TritonServer) -> None:
    """Where both are given the tensor is used, as in the official backend."""
    payload = {
        "text_input": PROMPT,
        "sampling_parameters": json.dumps(GREEDY),
        "max_tokens": 1,
        "return_num_output_tokens": True,
    }
    status, body = generate(server.http_url, payload)
    assert (status, body["text_output"]) == (200, PROMPT + ANSWER)


def test_request_parameters_over_grpc(server: TritonServer) -> None:
    """The parameters of a gRPC request are sampling parameters, numbers and booleans as strings included."""
    options = {"parameters": {"temperature": "0", "max_tokens": "7", "ignore_eos": True}}
    answer = ask(server, PROMPT, options=options, return_num_output_tokens=True)
    assert answer.values("num_output_tokens") == [[7]]


def test_the_pages_requests_are_answered(server: TritonServer) -> None:
    """README's and docs/laptop.md's `curl` lines, with this server's port; test_readme.py compares the answer that is shown."""
    texts = []
    for path, body in [*requests_in(CHECKOUT / "README.md"), *requests_in(CHECKOUT / "docs/laptop.md")]:
        status, answer = post(server.http_url, path, body, timeout=300)
        events = [json.loads(event.removeprefix("data:")) for event in answer.splitlines() if event.strip()]
        assert status == 200
        texts.append("".join(event["text_output"] for event in events))
    assert texts == [PROMPT + ANSWER, ANSWER]


def test_http_stream_begins_before_the_answer_has_ended(server: TritonServer) -> None:
    """A long answer is several events, however busy the machine is: the first does not wait for the last."""
    request = {"text_input": PROMPT, "stream": True, "temperature": 0, "max_tokens": 200, "ignore_eos": True}
    status, events = generate_stream(server.http_url, request)
    assert status == 200
    assert len(events) > 1
    assert "".join(event["text_output"] for event in events).startswith(ANSWER)


def test_requests_of_genai_perf(server: TritonServer) -> None:
    """Its stream of `text_input`, `stream`, `exclude_input_in_output` tensors and string parameters is answered."""
    options = {"parameters": {"max_tokens": "16", "min_tokens": "16", "ignore_eos": "true"}}
    answer = ask(server, PROMPT, options=options, stream=True, exclude_input_in_output=True, return_token_ids=True)
    assert len(answer.token_ids()) == 16


def test_thirty_two_streams_at_once_say_what_they_say_alone(server: TritonServer) -> None:
    """Under load responses may merge, but none is lost, doubled, reordered or given to another request."""
    texts = [*(text for text, _ in FACTS), *STRANGE]
    parameters = {"temperature": 0, "max_tokens": 48, "ignore_eos": True}
    requests = [prompt(text, parameters, stream=True) for text in texts]
    alone = [ask_all(server, [request])[0].text for request in requests]
    with ThreadPoolExecutor(4) as clients:
        loads = list(clients.map(lambda _: ask_all(server, requests), range(4)))
    together = [[answer.text for answer in answers] for answers in loads]
    assert together == [alone] * 4


def test_short_prompts_beside_ones_that_are_tokenized_in_a_thread(long_server: TritonServer) -> None:
    """Both ways of tokenizing use one tokenizer at once, and each prompt is answered as it is alone."""
    parameters = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
    pair = [prompt(text, parameters, stream=True, return_num_input_tokens=True) for text in (PROMPT, "Seine " * 800)]
    alone = [ask_all(long_server, [request])[0] for request in pair]
    with ThreadPoolExecutor(4) as clients:
        loads = list(clients.map(lambda _: ask_all(long_server, pair * 8), range(4)))
    for answers in loads:
        assert [answer.error for answer in answers] == [""] * 16
        assert [answer.text for answer in answers] == [answer.text for answer in alone] * 8
    assert alone[1].values("num_input_tokens")[-1][0] >= 800


def test_text_of_many_alphabets_comes_back_as_it_was(server: TritonServer) -> None:
    """UTF-8 goes in and out unchanged, and a character of several tokens is streamed once it is whole."""
    text = "Größe 🙂 東京 \u202eא"
    assert ask(server, text, {"max_tokens": 1}).text.startswith(text)
    choice = {"structured_outputs": {"choice": [text]}, "max_tokens": 64}
    streamed = ask(server, PROMPT, choice, stream=True)
    assert streamed.text == text
    assert all("\ufffd" not in response.text() for response in streamed.responses)


def test_types_of_all_outputs(server: TritonServer) -> None:
    """Names, shapes and types of the optional outputs are those of the contract."""
    flags = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")
    wanted = {f"return_{name}": True for name in flags}
    (response,) = ask(server, PROMPT, {"n": 2, "max_tokens": 4, "temperature": 1.0}, **wanted).responses
    assert {name: (value.dtype.type, value.shape) for name, value in response.tensors.items()} == {
        "text_output": (np.object_, (2,)),
        "finish_reason": (np.object_, (2,)),
        "cumulative_logprob": (np.float32, (2,)),
        "logprobs": (np.object_, (2,)),
        "num_input_tokens": (np.uint32, (1,)),
        "num_output_tokens": (np.uint32, (2,)),
    }
