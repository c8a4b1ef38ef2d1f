"""vLLM's own OpenAI server over the engine that Triton serves: equal answers, and closed doors."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from support import openai_routes
from support.event_stream import EventStream
from support.openai_judged import CLASSES, JUDGED
from support.openai_server import kept_server
from support.patience import wait_for
from support.settings import openai_url
from support.triton_client import generate, get, post
from triton_vllm.openai.fields import REFUSED, ROUTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.openai_server import KeptServer
    from support.serving import Parts
    from vllm_env.serve.server import TritonServer

pytestmark = pytest.mark.e2e
PARIS = [{"role": "user", "content": "Weather in Paris?"}]
HELLO = [{"role": "user", "content": "Hello!"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
FUNCTION = {
    "name": "get_weather",
    "description": "Ask.",
    "strict": True,
    "parameters": {**PARAMETERS, "additionalProperties": False},
}
TOOL = {"type": "function", "function": FUNCTION}
SCHEMA = {"enum": ["alpha", "beta"]}
CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "text": (TEXT, {"prompt": "Hello", "max_tokens": 8}),
    "text, with much": (TEXT, {"prompt": "Hello", "max_tokens": 4, "seed": 3, "logprobs": 2, "echo": True, "user": "me"}),
    "tokens": (TEXT, {"prompt": [1, 2, 3], "max_tokens": 4, "return_token_ids": True}),
    "chat": (CHAT, {"messages": HELLO, "max_tokens": 48, "logprobs": True, "top_logprobs": 2}),
    "tools": (CHAT, {"messages": PARIS, "tools": [TOOL], "max_tokens": 96}),
    "a named tool": (CHAT, {"messages": PARIS, "tools": [TOOL], "tool_choice": {**TOOL, "function": {"name": "get_weather"}}}),
    "a schema": (
        CHAT,
        {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    ),
    "a response": (RESPONSES, {"input": "Hello!", "max_output_tokens": 48}),
    "a response with tools": (RESPONSES, {"input": PARIS, "tools": [{"type": "function", **FUNCTION}], "max_output_tokens": 96}),
    "a message": (MESSAGES, {"messages": HELLO, "max_tokens": 48}),
}
"""Calls that may be streamed."""
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "count": ("/v1/messages/count_tokens", {"messages": HELLO}),
    "tokenize": ("/tokenize", {"prompt": "Hello", "return_token_strs": True}),
    "tokenize a chat": ("/tokenize", {"messages": HELLO}),
    "detokenize": ("/detokenize", {"tokens": [10, 11, 12]}),
}
RANDOM = {
    "id",
    "created",
    "created_at",
    "completed_at",
    "system_fingerprint",
    "item_id",
    "call_id",
    "sequence_number",
    "signature",
}
"""What no two answers have in common."""


PIECES = {"text", "content", "delta", "reasoning", "partial_json", "thinking", "arguments"}
"""Texts that come in pieces."""


@pytest.fixture(scope="module")
def url(chat_server: TritonServer) -> str:
    """Our port, of the model that test_model_chat.py asks through Triton."""
    return openai_url(chat_server)


@pytest.fixture(scope="module")
def theirs(chat_arguments: dict[str, Any], parts: Parts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeptServer]:
    """vLLM's own server of the same environment, with the same model under the same name."""
    options = {**chat_arguments, "served_model_name": "vllm", "tool_call_parser": "hermes", "enable_auto_tool_choice": True}
    with kept_server(parts.environment, options, tmp_path_factory.mktemp("openai") / "openai.log") as server:
        yield server


def same(value: Any) -> Any:
    """Return an answer without what is random."""
    if isinstance(value, dict):
        return {key: same(item) for key, item in value.items() if key not in RANDOM}
    return [same(item) for item in value] if isinstance(value, list) else value


def folded(text: str) -> list[Any]:
    """Return the events of a stream; how many pieces a text has is a matter of time."""
    events: list[Any] = []
    # vLLM's parser passes this on if it comes in a piece of its own, which is a matter of time, too
    for line in text.replace("<think>", "").splitlines():
        name, _, data = line.partition(": ")
        if name != "data":
            continue
        event = same(json.loads(data)) if data.startswith("{") else data
        last = events[-1] if events else None
        if not (isinstance(last, dict) and isinstance(event, dict) and joined(last, event)):
            events.append(event)
    return events


def joined(last: dict[str, Any], event: dict[str, Any]) -> bool:
    """Add the text of an event to the one before, if both are pieces of one text."""
    if "choices" in event and last.get("choices") and event["choices"]:
        (one, two) = (last["choices"][0], event["choices"][0])
        if one["index"] != two["index"] or one.get("finish_reason"):
            return False
        return added(one, two)
    if event.get("type") == "content_block_delta" or str(event.get("type")).endswith(".delta"):
        return event["type"] == last.get("type") and added(last, event)
    return False


def added(one: dict[str, Any], two: dict[str, Any]) -> bool:
    """Join two pieces: texts and lists are appended, other values are the later ones."""
    for key, value in two.items():
        before = one.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            added(before, value)
        elif key == "tool_calls" and before and value:
            added(before[0]["function"], value[0]["function"])
        elif before and (key in PIECES or isinstance(value, list)):
            one[key] = before + (value or type(before)())
        elif value is not None:
            one[key] = value
    return True


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_answers_are_those_of_vllms_own_server(url: str, theirs: KeptServer, call: str, stream: bool) -> None:
    """Whole and streamed, with tools, reasoning and constraints, in all protocols."""
    path, body = CALLS[call]
    request = {"model": "vllm", "temperature": 0, **body, "stream": stream}
    status, text = post(url, path, request, timeout=300)
    assert status == 200, text
    expected = theirs.ask(path, request)
    if stream:
        assert folded(text) == folded(expected)
        assert len(folded(text)) > 1
    else:
        assert same(json.loads(text)) == same(json.loads(expected))


@pytest.mark.parametrize("call", WHOLE)
def test_so_are_those_without_the_engine(url: str, theirs: KeptServer, call: str) -> None:
    """Tokens and their number."""
    path, body = WHOLE[call]
    request = {"model": "vllm", **body}
    status, text = post(url, path, request, timeout=300)
    assert (status, same(json.loads(text))) == (200, same(json.loads(theirs.ask(path, request))))


def test_the_model_has_its_name_in_triton_and_no_path(url: str) -> None:
    """A client need not learn where the files are."""
    (model,) = json.loads(get(url, "/v1/models")[1])["data"]
    assert (model["id"], model["root"], model["max_model_len"]) == ("vllm", "vllm", 512)
    status, text = post(url, TEXT, {"model": "other", "prompt": "x"}, timeout=300)
    assert (status, json.loads(text)["error"]["type"]) == (404, "NotFoundError")


LONG: dict[str, tuple[str, dict[str, Any]]] = {
    "a text": (TEXT, {"prompt": "word " * 2000}),
    "a very long text": (TEXT, {"prompt": "word " * 200_000}),
    "tokens": (TEXT, {"prompt": [5] * 600}),
    "a chat": (CHAT, {"messages": [{"role": "user", "content": "word " * 2000}]}),
    "a response": (RESPONSES, {"input": "word " * 200_000}),
}


@pytest.mark.parametrize("name", LONG)
def test_a_prompt_that_is_too_long_is_refused_in_vllms_words(url: str, name: str) -> None:
    """LiteLLM tells such a refusal by these words from others, and then tries a model that takes more."""
    path, body = LONG[name]
    status, text = post(url, path, {"model": "vllm", **body}, timeout=300)
    assert status == 400
    assert "this model's maximum context length is 512 tokens" in json.loads(text)["error"]["message"].lower()


def test_other_paths_get_a_reply(url: str) -> None:
    """Version, health and metrics; the metrics are vLLM's."""
    assert get(url, "/health") == (200, "")
    assert "version" in json.loads(get(url, "/version")[1])
    assert "vllm:generation_tokens_total{" in get(url, "/metrics")[1]


CLIENT = """
import sys
from openai import BadRequestError, OpenAI

client = OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
print([model.id for model in client.models.list()])
hello = {"model": "vllm", "messages": [{"role": "user", "content": "Hello!"}], "temperature": 0, "max_tokens": 48}
print(repr(client.chat.completions.create(**hello).choices[0].message.content))
pieces = client.chat.completions.create(**hello, stream=True)
print(repr("".join(piece.choices[0].delta.content or "" for piece in pieces)))
print(repr(client.responses.create(model="vllm", input="Hello!", temperature=0, max_output_tokens=48).output_text))
try:
    client.completions.create(model="vllm", prompt="x", extra_body={"vllm_xargs": {"a": 1}})
except BadRequestError as error:
    print(error.param)
"""


def test_the_openai_package_is_a_client(url: str, parts: Parts) -> None:
    """Whole, streamed and refused."""
    argv = [parts.environment / "bin" / "python", "-c", CLIENT, url]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False, env={**os.environ, "PYTHONPATH": ""})
    said = repr("\n\nHello, how can I help?")
    assert done.stdout.splitlines() == ["['vllm']", said, said, said, "vllm_xargs"], done.stderr


def test_no_other_path_of_vllm_answers(url: str, parts: Parts) -> None:
    """Read from vLLM's sources: whatever its application serves, the middleware lets nothing else in."""
    (package,) = parts.environment.glob("lib/python*/site-packages/vllm/entrypoints")
    found = {
        re.sub(r"{\w+}", "x", path)
        for file in package.rglob("*.py")
        for path in re.findall(r"@(?:router|app)\.\w+\(\s*\"(/[^\"]*)\"", file.read_text("utf-8"))
    }
    assert len(found) > 40
    found |= {"/docs", "/redoc", "/openapi.json", "/static/x", "/"}
    others = sorted(found - ROUTES.keys())
    answers = {path: {get(url, path)[0], post(url, path, {}, timeout=60)[0]} for path in others}
    assert {path: statuses for path, statuses in answers.items() if statuses != {404}} == {}


CONVERSATIONS = {"EmbeddingBatchChatRequest", "EmbeddingChatInputRequest", "EmbeddingBatchChatInputRequest"}
"""Many conversations, or one as `input`: the port takes texts and tokens there, and one conversation in `messages`."""


@pytest.mark.slow
def test_the_bodies_are_those_that_somebody_has_read(parts: Parts) -> None:
    """vLLM's application has the classes and fields of openai_judged.py. test_openai_fields.py compares the recorded ones."""
    argv = [str(parts.environment / "bin" / "python"), openai_routes.__file__, str(parts.model / "1")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    bodies = json.loads(done.stdout.splitlines()[-1])["bodies"]
    more = {path: {*bodies[path]["classes"]} ^ {*CLASSES[path]} for path in CLASSES}
    assert {path: names for path, names in more.items() if names} == {"/v1/embeddings": CONVERSATIONS}
    unread = {path: {*bodies[path]["fields"]} - JUDGED - REFUSED.keys() - ROUTES[path].refused.keys() for path in CLASSES}
    assert {path: names for path, names in unread.items() if names} == {}


PICTURE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}
DEADLY: dict[str, tuple[str, Any, int]] = {
    "a padded prompt": (CHAT, {"messages": HELLO, "chat_template_kwargs": {"max_length": 10**8, "padding": "max_length"}}, 400),
    "a prompt to cut": (TEXT, {"prompt": "x" * 50_000_000, "truncate_prompt_tokens": 10}, 413),
    "a long text": ("/tokenize", {"prompt": "x " * 1_950_000}, 400),
    "a host inside": (CHAT, {"messages": [{"role": "user", "content": [PICTURE]}]}, 400),
    "many completions": (TEXT, {"prompt": "x", "n": 128, "logprobs": 20, "max_tokens": 500}, 400),
    "a deep body": (TEXT, '{"prompt": ' + "[" * 1_000_000 + "]" * 1_000_000 + "}", 400),
    "a number": (TEXT, '{"prompt": "x", "max_tokens": 1' + "0" * 4000 + "}", 400),
    "beams": (TEXT, {"prompt": "x", "use_beam_search": True, "n": 50}, 400),
    "a constraint": (RESPONSES, {"input": "x", "stream": True, "structured_outputs": {"regex": "(" * 40 + ")" * 40}}, 400),
    "a wrong constraint": (RESPONSES, {"input": "x", "stream": True, "structured_outputs": {"regex": "("}}, 400),
}  # fmt: skip


@pytest.mark.parametrize("name", DEADLY)
def test_what_would_kill_or_stop_the_model_is_refused(url: str, name: str) -> None:
    """With a status, also if the answer would be streamed; and the next request is answered."""
    path, body, status = DEADLY[name]
    request = body if isinstance(body, str) else {"model": "vllm", **body}
    answered, text = post(url, path, request, timeout=300)
    assert answered == status, text
    assert json.loads(text)["error"]["message"]
    assert post(url, TEXT, {"model": "vllm", "prompt": "x", "max_tokens": 1}, timeout=300)[0] == 200


def test_connections_are_bounded(url: str) -> None:
    """Headers without an end, too many requests at once, and a try to speak another protocol."""
    place = (urlsplit(url).hostname, urlsplit(url).port)
    line = b"GET /health HTTP/1.1\r\nhost: x\r\n"
    headers = b"".join(b"x-%d: %s\r\n" % (number, b"a" * 1000) for number in range(10_000))
    with socket.create_connection(place) as client, pytest.raises(ConnectionError):
        client.sendall(line + headers)
    with socket.create_connection(place) as client:
        client.sendall((line + b"\r\n") * 1000)
        answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert answer.count(b"HTTP/1.1 200") < 1000
    upgrade = b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: eA==\r\nsec-websocket-version: 13\r\n"
    with socket.create_connection(place) as client:
        client.sendall(b"GET /v1/realtime HTTP/1.1\r\nhost: x\r\n" + upgrade + b"\r\n")
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 404")
    assert get(url, "/health")[0] == 200


def test_a_client_that_hangs_up_stops_its_request(chat_server: TritonServer, url: str) -> None:
    """And both APIs go on."""
    body = {"model": "vllm", "prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with EventStream(url, TEXT, body) as stream:
        stream.wait(1)
    wait_for(lambda: _running(url) == 0, "the end of the request in the engine")
    assert generate(chat_server.http_url, {"text_input": "x", "max_tokens": 1})[0] == 200


def _running(url: str) -> float:
    (line,) = [line for line in get(url, "/metrics")[1].splitlines() if line.startswith("vllm:num_requests_running{")]
    return float(line.rpartition(" ")[2])
