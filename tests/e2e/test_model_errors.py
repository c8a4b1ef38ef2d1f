"""Bad input: an error for that request only, with a text that clients can match on, and no internals in it."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import grpc  # type: ignore[import-untyped]  # it comes with tritonclient, without types
import pytest
from tritonclient.grpc import aio

from support.model_requests import ask, ask_all, prompt
from support.open_stream import OpenStream
from support.reference import ONE_THREAD
from support.triton_client import generate, post, stream, tensor, text_of
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from support.serving import Serve
    from vllm_env.serve.server import TritonServer

pytestmark = pytest.mark.e2e
PROMPT, ANSWER = FACTS[2]
GOOD = prompt(PROMPT, {"temperature": 0, "max_tokens": 64}, exclude_input_in_output=True)
# what no client should read: Python's names for things, paths, and the names of this adapter's and vLLM's parts
INTERNALS = ("Traceback", "NoneType", "object at 0x", ".py", "site-packages", "triton_vllm", "<class", "KeyError")
CHAT = '[{"role": "user", "content": "hello"}]'


def tensors(parameters: Any = None, **inputs: Any) -> dict[str, Any]:
    """A request that is good but for what is given."""
    return prompt(PROMPT, parameters, **inputs)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "ill-formed JSON": (tensors('{"max_tokens": '), "sampling_parameters is not valid JSON"),
    "JSON list": (tensors("[1]"), "sampling_parameters must be a JSON object, not a list"),
    "JSON null": (tensors("null"), "sampling_parameters must be a JSON object"),
    "deep JSON": (tensors("[" * 100_000), "sampling_parameters is nested too deeply"),
    "wrong type": (tensors({"max_tokens": "many"}), "sampling parameter 'max_tokens' must be an integer, not \"many\""),
    "fraction for int": (tensors({"max_tokens": 1.5}), "'max_tokens' must be an integer, not 1.5"),
    "bool for int": (tensors({"max_tokens": True}), "'max_tokens' must be an integer, not true"),
    "bool for float": (tensors({"temperature": False}), "'temperature' must be a finite number, not false"),
    "text for bool": (tensors({"ignore_eos": "maybe"}), "'ignore_eos' must be true or false, not \"maybe\""),
    "text for float": (tensors({"temperature": "hot"}), "'temperature' must be a finite number, not \"hot\""),
    "list for float": (tensors({"temperature": [1]}), "'temperature' must be a finite number, not [1]"),
    "NaN": (tensors('{"temperature": NaN}'), "NaN is not a JSON number"),
    "Infinity": (tensors('{"temperature": -Infinity}'), "-Infinity is not a JSON number"),
    "NaN as text": (tensors({"temperature": "nan"}), "'temperature' must be a finite number"),
    "huge number": (tensors('{"temperature": 1e999}'), "'temperature' must be a finite number"),
    "unknown": (tensors({"max_token": 5}), "unknown sampling parameter 'max_token', did you mean 'max_tokens'?"),
    "unknown, like none": (tensors({"zzz": 5}), "unknown sampling parameter 'zzz'"),
    "internal": (tensors({"output_kind": 1}), "unknown sampling parameter 'output_kind'"),
    "negative max_tokens": (tensors({"max_tokens": -1}), "max_tokens must be at least 1"),
    "negative temperature": (tensors({"temperature": -0.5}), "temperature must be non-negative"),
    "top_p above one": (tensors({"top_p": 1.5}), "top_p must be in (0, 1]"),
    "n of zero": (tensors({"n": 0}), "n must be at least 1"),
    "negative n": (tensors({"n": -2}), "n must be at least 1"),
    "huge n": (tensors({"n": 10**9}), "n must be"),
    "negative logprobs": (tensors({"logprobs": -3}), "logprobs must be"),
    "too many logprobs": (tensors({"logprobs": 5000}), "logprobs"),
    "seed out of range": (tensors({"seed": 2**70}), "seed"),
    "unknown token id": (tensors({"allowed_token_ids": [99_999]}), "allowed_token_ids"),
    "unknown token in bias": (tensors({"logit_bias": {"99999": 1}}), "logit_bias"),
    "bad JSON schema": (tensors({"structured_outputs": {"json": '{"type": 5}'}}), ""),
    "bad regex": (tensors({"structured_outputs": {"regex": "[a"}}), ""),
    "bad grammar": (tensors({"structured_outputs": {"grammar": "root := ("}}), ""),
    "two constraints": (tensors({"structured_outputs": {"regex": "a", "choice": ["b"]}}), "structured_outputs"),
    "empty choice": (tensors({"structured_outputs": {"choice": []}}), ""),
    "unknown constraint": (tensors({"structured_outputs": {"regx": "a"}}), "did you mean 'regex'?"),
    "long prompt": (prompt("word " * 2000, {"max_tokens": 1}), "maximum"),
    "empty prompt": (prompt("", {"max_tokens": 1}), "text_input is empty"),
    "not UTF-8": (prompt(None, text_input=b"\xff\xfe\xfd"), "text_input must be UTF-8"),
    "no prompt": (prompt(None, {"max_tokens": 1}), "exactly one of text_input, messages, prompt_token_ids is required"),
    "two prompts": (tensors(messages=CHAT), "exactly one of text_input, messages, prompt_token_ids is required"),
    "messages not JSON": (prompt(None, messages="hello"), "messages is not valid JSON"),
    "messages without role": (prompt(None, messages='[{"content": "x"}]'), "messages must be a non-empty JSON list"),
    "messages empty": (prompt(None, messages="[]"), "messages must be a non-empty JSON list"),
    "tools no list": (prompt(None, messages=CHAT, tools="{}"), "tools must be a JSON list"),
    "negative token id": (prompt(None, prompt_token_ids=[1, -1]), "prompt_token_ids must be a non-empty list"),
    "token id out of vocabulary": (prompt(None, prompt_token_ids=[999_999]), "vocabulary"),
    "bad base64": (tensors(image="not base64!"), "image[0] is not valid base64"),
    "no image": (tensors(image="aGVsbG8="), "image[0] cannot be decoded"),
    "LoRA off": (tensors({"lora_name": "sql"}), "LoRA feature is not enabled."),
    "LoRA name no text": (tensors({"lora_name": 3}), "lora_name must be a string"),
    "stream with echo": (
        tensors(stream=True, exclude_input_in_output=False),
        "When streaming, `exclude_input_in_output` = False is not allowed.",
    ),
    "negative timeout": (tensors({"timeout": -1}), "timeout must not be negative"),
    "priority no number": (tensors({"priority": "high"}), "priority must be an integer"),
    "embedding request": (
        {"embedding_request": '{"input": "hello"}'},
        "Model vllm does not support 'embed' request",
    ),
    "embedding without input": ({"embedding_request": "{}"}, "embedding_request.input must be a non-empty string"),
    "embedding no JSON": ({"embedding_request": "{"}, "embedding_request is not valid JSON"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_request_fails_alone(server: TritonServer, name: str) -> None:
    """It gets one error that names the trouble; the neighbours before and after it on the stream are served."""
    bad, text = BAD[name]
    responses = stream(server.grpc_url, [GOOD, bad, GOOD])
    failed = [response.error for response in responses if response.error]
    assert len(failed) == 1, failed
    assert text in failed[0]
    assert failed[0].strip()
    assert len(failed[0]) < 600
    assert not [word for word in INTERNALS if word in failed[0]], failed[0]
    assert (text_of(responses, 0), text_of(responses, 1), text_of(responses, 2)) == (ANSWER, "", ANSWER)


@pytest.fixture(scope="module")
def own_server(serving: Serve) -> Iterator[TritonServer]:
    """A server of its own: an error that ends its stream with a status has ended tritonserver, too."""
    with serving(environment=ONE_THREAD) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize(
    ("request_tensors", "code"),
    [
        (tensors({"max_tokens": "many"}), "INVALID_ARGUMENT"),
        (tensors({"max_token": 3}), "INVALID_ARGUMENT"),
        (tensors("{"), "INVALID_ARGUMENT"),
        (prompt("word " * 2000), "INVALID_ARGUMENT"),
        (tensors({"temperature": -1}), "INVALID_ARGUMENT"),
        (tensors({"allowed_token_ids": [99_999]}), "INVALID_ARGUMENT"),
        (tensors(image="aGVsbG8="), "INVALID_ARGUMENT"),
        (tensors({"lora_name": "sql"}), "INVALID_ARGUMENT"),
        (tensors(stream=True, exclude_input_in_output=False), "INVALID_ARGUMENT"),
        ({"embedding_request": '{"input": "hello"}'}, "UNIMPLEMENTED"),
        (tensors({"timeout": 1, "max_tokens": 200, "ignore_eos": True}), "UNAVAILABLE"),
    ],
    ids=lambda v: str(v)[:60],
)
def test_status_tells_the_kind_of_error(own_server: TritonServer, request_tensors: dict[str, Any], code: str) -> None:
    """The gRPC status says whether it is the client's fault, not for this model, or a matter of time."""
    with OpenStream(own_server.grpc_url, request_tensors, codes=True) as one:
        assert code in one.wait_end().status


async def _refused_with_a_status(url: str, times: int) -> list[str]:
    """Send a request that is refused so often, each on a stream that its client has half-closed; return the statuses."""
    statuses = []
    inputs = [tensor(name, value) for name, value in tensors({"max_tokens": "many"}).items()]
    async with aio.InferenceServerClient(url) as client:
        for _ in range(times):

            async def requests() -> AsyncIterator[dict[str, Any]]:
                yield {"model_name": "vllm", "inputs": inputs}

            try:
                async for _ in client.stream_infer(requests(), headers={"triton_grpc_error": "true"}):
                    pass
            except grpc.aio.AioRpcError as error:
                statuses.append(str(error.code()))
            await asyncio.sleep(0.05)  # the later flag has come
    return statuses


@pytest.mark.slow
def test_an_error_with_its_status_leaves_the_server_alive(light_serving: Serve) -> None:
    """Triton 24.10 ended by signal 11 if the flag came later, or the error at once (base/triton.py)."""
    with light_serving(environment=ONE_THREAD) as running:
        statuses = asyncio.run(_refused_with_a_status(running.grpc_url, 60))
        assert statuses == ["StatusCode.INVALID_ARGUMENT"] * 60
        assert ask(running, PROMPT, json.loads(GOOD["sampling_parameters"])).text == PROMPT + ANSWER


@pytest.mark.parametrize("body", ["{", "[]", '{"text_input": 5}', '{"text_input": ["a", "b"]}'])
def test_body_that_triton_refuses(server: TritonServer, body: str) -> None:
    """What is not for the model to judge gets Triton's own error, and the model lives on."""
    status, text = post(server.http_url, "/v2/models/vllm/generate", body, timeout=120)
    assert status >= 400
    assert "error" in json.loads(text)
    assert ask(server, PROMPT, json.loads(GOOD["sampling_parameters"])).text == PROMPT + ANSWER


def test_http_generate_shows_the_error(server: TritonServer) -> None:
    """Over HTTP a bad request is a 400 with the same text."""
    status, answer = generate(server.http_url, {"text_input": PROMPT, "max_token": 3})
    assert (status, "did you mean 'max_tokens'?" in answer["error"]) == (400, True)


def test_hundred_bad_requests_in_a_row(server: TritonServer) -> None:
    """Errors cost nothing that adds up: a good answer still comes after a hundred of them on one stream."""
    bad = [BAD["bad regex"][0], BAD["long prompt"][0], BAD["unknown"][0], BAD["ill-formed JSON"][0]] * 25
    answers = ask_all(server, [*bad, GOOD])
    assert answers[-1].text == ANSWER
