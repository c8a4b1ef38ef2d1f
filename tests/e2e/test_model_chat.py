"""Chats are answered as vLLM's own OpenAI server answers them: tool calls, reasoning, content, defaults and usage."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support import models
from support.model_requests import ask
from support.openai_server import kept_server
from support.pages import requests_in
from support.serving import CPU_ARGUMENTS
from support.triton_client import generate, generate_stream, post

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.model_requests import Answer
    from support.openai_server import KeptServer
    from support.serving import Parts
    from vllm_env.serve.server import TritonServer

pytestmark = pytest.mark.e2e
PAGE = Path(__file__).parents[2] / "docs" / "chat.md"
FLAGS = {
    f"return_{name}": True
    for name in ("finish_reason", "num_input_tokens", "num_output_tokens", "num_cached_tokens", "token_ids")
}


def _tool(name: str) -> dict[str, Any]:
    properties = {"city": {"type": "string", "maxLength": 12}}
    parameters = {"type": "object", "properties": properties, "required": ["city"], "additionalProperties": False}
    # strict: without it vLLM constrains the function's name only, and this model was not taught to call where it is forced to
    return {"type": "function", "function": {"name": name, "description": "Ask.", "strict": True, "parameters": parameters}}


TOOLS = [_tool("get_weather"), _tool("get_time")]
OBJECTS_REFUSED = "Unable to parse JSON bytes array: attempt to access JSON non-string as string"
"""Triton's own answer; docs/chat.md cites it."""
SCHEMA = {"enum": ["alpha", "beta"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "get_time"}}
PARIS, TWO, HELLO = ("Weather in Paris?", "Weather in Rome and Oslo?", "Hello!")


@dataclass(frozen=True)
class Servers:
    """Ours, and vLLM's."""

    triton: TritonServer
    openai: KeptServer


@dataclass(frozen=True)
class Said:
    """An answer, from either server; without the identities of tool calls, which are random."""

    content: str
    reasoning: str
    tool_calls: list[dict[str, str]]
    finish_reason: str
    usage: tuple[int, int, int]


@pytest.fixture(scope="module")
def servers(
    chat_server: TritonServer, chat_arguments: dict[str, Any], parts: Parts, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    """Both servers, with one model."""
    options = {**chat_arguments, "served_model_name": "chat", "tool_call_parser": "hermes"}
    options |= {"enable_auto_tool_choice": True, "enable_prompt_tokens_details": True}
    with kept_server(parts.environment, options, tmp_path_factory.mktemp("chat") / "openai.log") as openai:
        yield Servers(chat_server, openai)


def conversation(*texts: str) -> list[dict[str, Any]]:
    """Return messages: of the user, and of the assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def ours(servers: Servers, request: dict[str, Any], parameters: dict[str, Any] | None, *, stream: bool) -> Said:
    """Ask our server; what goes there in a tensor is JSON."""
    given = {name: value if isinstance(value, bool) else json.dumps(value) for name, value in request.items()}
    answer = ask(servers.triton, None, parameters, stream=stream, **given, **FLAGS)
    assert not answer.error
    return said(answer)


def said(answer: Answer) -> Said:
    """Put the responses of one answer together."""
    deltas = [json.loads(part[0]) for part in answer.values("tool_calls")]
    reasons = [part[0].decode() for part in answer.values("finish_reason")]
    assert set(reasons[:-1]) <= {"None"}
    numbers = [
        answer.values("num_input_tokens")[-1][0],
        sum(part[0] for part in answer.values("num_output_tokens")),
        answer.values("num_cached_tokens")[-1][0],
    ]
    calls = joined([call for part in deltas for call in part])
    reasoning = b"".join(part[0] for part in answer.values("reasoning")).decode()
    return Said(answer.text, reasoning, calls, reasons[-1], (numbers[0], numbers[1], numbers[2]))


def joined(calls: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Return whole tool calls, from whole ones or from deltas, each of which has an index."""
    found: dict[int, dict[str, str]] = {}
    for number, call in enumerate(calls):
        whole = found.setdefault(call.get("index", number), {"name": "", "arguments": ""})
        for name in whole:
            whole[name] += call["function"].get(name) or ""
    return [found[number] for number in sorted(found)]


def theirs(servers: Servers, request: dict[str, Any], parameters: dict[str, Any] | None, *, stream: bool) -> Said:
    """Ask vLLM's server; what our request has in the template's arguments is a field there."""
    body = {"model": "chat", **request, **(parameters or {}), **request.get("chat_template_kwargs", {})}
    if not stream:
        answer = json.loads(servers.openai.ask("/v1/chat/completions", body))
        choice, usage = answer["choices"][0], answer["usage"]
        message = choice["message"]
        calls = joined(message.get("tool_calls") or [])
        return Said(message.get("content") or "", message.get("reasoning") or "", calls, choice["finish_reason"], counts(usage))
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    text = servers.openai.ask("/v1/chat/completions", body)
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    events = [json.loads(line) for line in lines]
    choices = [choice for event in events for choice in event["choices"]]
    deltas = [choice["delta"] for choice in choices]
    calls = joined([call for delta in deltas for call in delta.get("tool_calls") or []])
    content, reasoning = ("".join(delta.get(name) or "" for delta in deltas) for name in ("content", "reasoning"))
    reason = next(choice["finish_reason"] for choice in reversed(choices) if choice["finish_reason"])
    return Said(content, reasoning, calls, reason, counts(events[-1]["usage"]))


def counts(usage: dict[str, Any]) -> tuple[int, int, int]:
    """Return the tokens of the prompt, of the answer, and of those of the prompt the cached ones."""
    details = usage.get("prompt_tokens_details") or {}
    return usage["prompt_tokens"], usage["completion_tokens"], details.get("cached_tokens") or 0


REASONED = conversation(HELLO, "Hello, how can I help?", PARIS)
REASONED[1]["reasoning_content"] = "A greeting. " * 20
REQUESTS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "call": ({"messages": conversation(PARIS), "tools": TOOLS}, {"temperature": 0}),
    "two calls": ({"messages": conversation(TWO), "tools": TOOLS}, {"temperature": 0}),
    "one of two": ({"messages": conversation(TWO), "tools": TOOLS, "parallel_tool_calls": False}, {"temperature": 0}),
    "no call": ({"messages": conversation(HELLO), "tools": TOOLS}, {"temperature": 0}),
    "no tools": ({"messages": conversation(HELLO)}, {"temperature": 0}),
    "none": ({"messages": conversation(PARIS), "tools": TOOLS, "tool_choice": "none"}, {"temperature": 0}),
    "auto": ({"messages": conversation(PARIS), "tools": TOOLS, "tool_choice": "auto"}, {"temperature": 0}),
    "required": ({"messages": conversation(HELLO), "tools": TOOLS, "tool_choice": "required"}, {"temperature": 0}),
    "named": ({"messages": conversation(HELLO), "tools": TOOLS, "tool_choice": NAMED}, {"temperature": 0}),
    "cut": ({"messages": conversation(PARIS), "tools": TOOLS}, {"temperature": 0, "max_tokens": 30}),
    "defaults": ({"messages": conversation("Once upon a time")}, {"ignore_eos": True}),
    "continued": (
        {
            "messages": conversation(HELLO, "<think>\nA greeting.\n</think>\n\nHello, how"),
            "chat_template_kwargs": {"continue_final_message": True, "add_generation_prompt": False},
        },
        {"temperature": 0},
    ),
    "no generation prompt": (
        {"messages": conversation(HELLO), "chat_template_kwargs": {"add_generation_prompt": False}},
        {"temperature": 0, "max_tokens": 20},
    ),
    "format": ({"messages": conversation(HELLO)}, {"temperature": 0, "response_format": FORMAT}),
    "named and a format": (
        {"messages": conversation(HELLO), "tools": TOOLS, "tool_choice": NAMED},
        {"temperature": 0, "response_format": FORMAT},
    ),
    "required and a format": (
        {"messages": conversation(HELLO), "tools": TOOLS, "tool_choice": "required"},
        {"temperature": 0, "response_format": FORMAT},
    ),
    "reasoned before": ({"messages": REASONED}, {"temperature": 0, "max_tokens": 8}),
    "shortened": ({"messages": conversation(HELLO)}, {"temperature": 0, "max_completion_tokens": 9}),
}  # fmt: skip


TRIES = 5
"""vLLM's server reads tokens together that came while it was busy, and some of its parsers then leave a "<think>" in the text."""


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", REQUESTS)
def test_an_answer_is_what_vllms_server_gives(servers: Servers, name: str, stream: bool) -> None:
    """Content, reasoning, tool calls, finish reason and usage; with our defaults and its."""
    request, parameters = REQUESTS[name]
    found = ours(servers, request, parameters, stream=stream)
    tries = TRIES if stream else 1
    for _ in range(tries):
        expected = theirs(servers, request, parameters, stream=stream)
        if name == "cut":  # streamed, it is `tool_calls` before 0.32, although half of the arguments are missing
            expected = replace(expected, finish_reason="length")
        if found == expected:
            break
    else:
        servers.openai.forget(tries)
    assert found == expected
    _check_meaning(name, found)


def _check_meaning(name: str, found: Said) -> None:
    """The requests are about what they are named for: else two servers could agree on nothing."""
    names = [call["name"] for call in found.tool_calls]
    if name in ("call", "auto"):
        assert (names, found.reasoning.strip(), found.finish_reason) == (["get_weather"], "Paris, so I ask.", "tool_calls")
        assert json.loads(found.tool_calls[0]["arguments"]) == {"city": "Paris"}
    elif name == "two calls":
        assert [json.loads(call["arguments"])["city"] for call in found.tool_calls] == ["Rome", "Oslo"]
        assert found.content.strip() == "Let me look."
    elif name in ("one of two", "required", "required and a format"):
        assert (len(names), found.finish_reason) == (1, "tool_calls")
    elif name in ("named", "named and a format"):
        assert names == ["get_time"]
    elif name == "defaults":
        assert (found.usage[1], found.finish_reason) == (models.CHAT_DEFAULTS["max_new_tokens"], "length")
    elif name == "continued":
        assert (found.reasoning + found.content).strip() == "can I help?"
    elif name == "format":
        assert json.loads(found.content) in SCHEMA["enum"]
    elif name == "reasoned before":
        assert found.usage[0] > len(REASONED[1]["reasoning_content"].split())
    elif name == "shortened":
        assert (found.usage[1], found.finish_reason) == (9, "length")
    else:
        assert names == [] or name == "cut"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_cached_tokens_are_counted(servers: Servers, stream: bool) -> None:
    """The second time most of a long prompt comes from the prefix cache, on both servers."""
    request = {"messages": conversation(f"{stream} " + "Seine " * 60)}
    parameters = {"temperature": 0, "max_tokens": 2}
    pairs = [[asked(servers, request, parameters, stream=stream).usage for asked in (ours, theirs)] for _ in range(2)]
    assert pairs[0][0] == pairs[0][1]
    assert pairs[1][0] == pairs[1][1]
    assert pairs[0][0][2] == 0 < pairs[1][0][2]


def test_every_completion_is_parsed_by_itself(servers: Servers) -> None:
    """With `n` each output has an element for each completion, also in a stream."""
    request = {"messages": json.dumps(conversation(PARIS)), "tools": json.dumps(TOOLS)}
    for stream in (False, True):
        answer = ask(servers.triton, None, {"n": 2}, stream=stream, **request, **FLAGS)
        for number in range(2):
            calls = joined([call for part in answer.values("tool_calls") for call in json.loads(part[number])])
            assert [call["name"] for call in calls] == ["get_weather"]
            assert b"".join(part[number] for part in answer.values("reasoning")).strip() == b"Paris, so I ask."
            entries = [call for part in answer.values("tool_calls") for call in json.loads(part[number])]
            assert entries[0]["id"]
            assert entries[0]["function"]["name"] == "get_weather"
            assert {entry.get("index") for entry in entries} == ({0} if stream else {None})
            assert not any(entry.get("id") or entry["function"].get("name") for entry in entries[1:])
        ends = [{word for word in column if word != b"None"} for column in zip(*answer.values("finish_reason"), strict=True)]
        assert ends == [{b"tool_calls"}] * 2


@pytest.mark.parametrize("stop", ["zzz", "Q" * 20, "greeting.\n</think>\n\nHello, who", "how", "</tool_call>"])
@pytest.mark.parametrize("text", [HELLO, TWO])
def test_a_stop_string_takes_nothing_else_from_a_stream(servers: Servers, text: str, stop: str) -> None:
    """vLLM holds back the text in which one may begin, and not its tokens, by which its parsers find the end of the reasoning."""
    request = {"messages": conversation(text), "tools": TOOLS}
    free = ours(servers, request, {"temperature": 0}, stream=True)
    held = ours(servers, request, {"temperature": 0, "stop": [stop]}, stream=True)
    assert held.reasoning == free.reasoning
    assert held.content == free.content.partition(stop)[0]
    assert held.tool_calls == (free.tool_calls[:1] if stop == "</tool_call>" else free.tool_calls)


def test_a_text_is_not_parsed_and_keeps_its_defaults(servers: Servers) -> None:
    """`text_input` answers as the official backend does: 16 tokens, and the text as it is."""
    answer = ask(servers.triton, models.CHAT_FACTS[0][0], {"temperature": 0, "ignore_eos": True}, **FLAGS)
    assert len(answer.token_ids()) == 16
    assert "<think>" in answer.text
    assert "tool_calls" not in answer.responses[0].tensors


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"tool_choice": "any"}, "tool_choice is not valid JSON"),
        ({"tool_choice": '"any"'}, "tool_choice must be none, auto, required or {"),
        ({"tool_choice": "required"}, "tool_choice is required, which needs tools"),
        ({"tools": json.dumps(TOOLS), "tool_choice": json.dumps({**NAMED, "function": {"name": "get_wether"}})}, "did you mean"),
        ({"tools": '[{"type": "function"}]'}, "tools.0.function"),
        (
            {"chat_template_kwargs": f'{{"thinking_budget": {2**63}}}'},
            "chat_template_kwargs holds an integer of more than 64 bits",
        ),
        ({"sampling_parameters": '{"include_reasoning": false}'}, "unknown sampling parameter 'include_reasoning'"),
        ({"sampling_parameters": '{"user": "me"}'}, "unknown sampling parameter 'user'"),
        ({"chat_template_kwargs": '{"continue_final_message": true, "add_generation_prompt": true}'}, "exclude each other"),
    ],
)
def test_a_wrong_choice_is_refused_by_name(servers: Servers, given: dict[str, str], says: str) -> None:
    """The error names the input and what it must be."""
    assert says in ask(servers.triton, None, messages=json.dumps(conversation(HELLO)), **given).error


def test_messages_over_http_generate(servers: Servers) -> None:
    """A string with the list, a list of strings with a message each; a list of objects never reaches the model."""
    url = servers.triton.http_url
    message = conversation(HELLO)[0]
    for given in (json.dumps([message]), [json.dumps(message)], json.dumps(message)):
        status, answer = generate(url, {"messages": given})
        assert status == 200, answer
        assert answer["text_output"].strip() == "Hello, how can I help?"
        assert answer["reasoning"].strip() == "A greeting."
    two = [json.dumps(part) for part in conversation(HELLO, "Hello, how can I help?", HELLO)]
    assert generate(url, {"messages": two})[0] == 200
    status, events = generate_stream(url, {"messages": json.dumps([message]), "stream": True})
    assert status == 200
    assert "".join(event["text_output"] for event in events).strip() == "Hello, how can I help?"
    status, answer = generate(url, {"messages": [message]})
    assert (status, answer["error"]) == (500, OBJECTS_REFUSED)


def test_the_pages_request_is_answered(servers: Servers) -> None:
    """The `curl` line of docs/chat.md as it stands there, with this server's port."""
    ((path, body),) = requests_in(PAGE, "test_model_chat.py")
    status, answer = post(servers.triton.http_url, path, body, timeout=300)
    assert status == 200
    assert json.loads(answer)["text_output"].strip() == "Hello, how can I help?"


def test_a_chat_may_answer_for_as_long_as_there_is_room(server: TritonServer) -> None:
    """Where neither the request nor the model has a `max_tokens`: not 16, but what the prompt leaves of the model's length."""
    flags = {"return_num_input_tokens": True, "return_num_output_tokens": True}
    answer = ask(server, None, {"ignore_eos": True}, messages=json.dumps(conversation(HELLO)), **flags)
    assert answer.values("num_input_tokens")[0][0] + answer.values("num_output_tokens")[0][0] == CPU_ARGUMENTS["max_model_len"]
    assert "reasoning" not in answer.responses[0].tensors
    refused = ask(server, None, messages=json.dumps(conversation(HELLO)), tools=json.dumps(TOOLS), tool_choice="auto")
    assert "this model has no tool_parser" in refused.error
