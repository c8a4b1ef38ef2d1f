"""The parsers' names are taken out of the engine arguments, and unknown ones are refused with vLLM's list."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import ClassVar

import pytest

from triton_vllm.base.errors import ConfigError
from triton_vllm.chat import parsers
from triton_vllm.chat.request import Chat
from triton_vllm.vllm_api import Conversation, ParserNames, Parsers

TOOLS = ({"type": "function", "function": {"name": "ask", "strict": True}},)


class Manager:
    """In place of vLLM's managers of parsers."""

    known: tuple[str, ...] = ("hermes", "mistral")

    @classmethod
    def list_registered(cls):
        return list(cls.known)


@pytest.fixture
def vllm(monkeypatch):
    """A vLLM with two parsers of each kind."""
    manager = type("Manager", (Manager,), {})
    request = SimpleNamespace(extract_structured_outputs=1)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__path__=[]))
    for name in ("vllm.entrypoints", "vllm.entrypoints.openai", "vllm.entrypoints.openai.chat_completion", "vllm.parser"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))
    monkeypatch.setitem(
        sys.modules, "vllm.entrypoints.openai.chat_completion.protocol", SimpleNamespace(ChatCompletionRequest=request)
    )
    parser = SimpleNamespace(Parser=SimpleNamespace(parse=1, parse_delta=1))
    monkeypatch.setitem(sys.modules, "vllm.parser.abstract_parser", parser)
    monkeypatch.setitem(sys.modules, "vllm.tool_parsers", SimpleNamespace(ToolParserManager=manager))
    monkeypatch.setitem(sys.modules, "vllm.reasoning", SimpleNamespace(ReasoningParserManager=manager))


@pytest.mark.parametrize("name", ["tool_parser", "tool_call_parser"])
def test_the_tool_parser_is_no_engine_argument(name):
    """Under our name, or that of vLLM's option."""
    assert parsers.split({"model": "m", name: "hermes"}, "f") == ({"model": "m"}, "hermes")
    assert parsers.split({"model": "m", name: None}, "f") == ({"model": "m"}, "")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"tool_parser": 1}, "f: tool_parser must be the name of a parser"),
        ({"tool_parser": "hermes", "tool_call_parser": "mistral"}, "tool_parser and tool_call_parser differ"),
    ],
)
def test_what_is_no_name_is_refused(given, says):
    """With the file and the argument."""
    with pytest.raises(ConfigError) as refused:
        parsers.split(given, "f")
    assert says in str(refused.value)


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("tool", "reasoning", "says"),
    [
        ("herms", "", "f: tool_parser: vLLM has no parser 'herms', did you mean 'hermes'?; it has hermes, mistral"),
        ("", "deep", "f: reasoning_parser: vLLM has no parser 'deep'; it has hermes, mistral"),
    ],
)
def test_unknown_names_are_refused_with_the_known_ones(tool, reasoning, says):
    """Before the engine starts."""
    with pytest.raises(ConfigError) as refused:
        parsers.choose(tool, {"reasoning_parser": reasoning}, "f")
    assert str(refused.value) == says


def test_a_vllm_without_parsers_is_told(monkeypatch):
    """It would answer with what the model writes, unread."""
    monkeypatch.setitem(sys.modules, "vllm.parser", None)
    with pytest.raises(ConfigError, match=r"tool_parser needs a vLLM whose vllm\.parser"):
        parsers.choose("hermes", {}, "f")
    assert not parsers.choose("", {"reasoning_parser": "qwen3"}, "f")  # there it only says where a constraint begins


class ChatRequest(SimpleNamespace):
    """In place of vLLM's ChatCompletionRequest."""

    structured_outputs = None
    tools = None
    tool_choice = "auto"

    def build_chat_params(self, template, content):
        return SimpleNamespace(chat_template_kwargs={})

    def extract_structured_outputs(self):
        return self.structured_outputs


class Adjusting:
    """In place of vLLM's parser, which may compile the constraint that it is given."""

    reasoning_parser_cls = None
    seen: ClassVar[list[object]] = []

    def __init__(self, tokenizer, tools, **options):
        pass

    def adjust_request(self, request):
        self.seen.append(request.structured_outputs)
        request.structured_outputs = "made of the tools"
        return request


@pytest.mark.parametrize(
    ("choice", "tools", "seen", "holds"),
    [
        ("auto", TOOLS, None, "own"),
        (None, TOOLS, None, "own"),
        ("required", TOOLS, None, "made of the tools"),
        ({"type": "function", "function": {"name": "f"}}, TOOLS, None, "made of the tools"),
        ("auto", None, "own", "made of the tools"),
    ],
)
def test_a_clients_constraint_is_not_compiled_where_requests_are_admitted(choice, tools, seen, holds):
    """vLLM would, to join it to tools that may be called; it is tried within bounds later, and holds alone."""
    parsers_of_model = Parsers.__new__(Parsers)
    vars(parsers_of_model).update(
        names=ParserNames("hermes"), _request_class=ChatRequest, _parser_class=Adjusting, _tokenizer=None, _config=None
    )
    Adjusting.seen.clear()
    chat = Chat(({"role": "user", "content": "x"},), tools, tool_choice=choice)
    conversation = parsers_of_model.open(chat.fields(), "own", stream=False)
    assert Adjusting.seen == [seen]
    assert conversation.structured() == holds


@pytest.mark.parametrize(
    ("skips", "spaces", "off"),
    [
        (True, True, {}),
        (None, True, {}),  # vLLM 0.33's default
        (False, False, {"skip_special_tokens": False, "spaces_between_special_tokens": False}),
    ],
)
def test_only_what_the_parsers_have_switched_off_is_off(skips, spaces, off):
    """A default that is not said is vLLM's to choose."""
    request = SimpleNamespace(skip_special_tokens=skips, spaces_between_special_tokens=spaces)
    assert Conversation(request, lambda: None, {}, auto_tools=True).decoding() == off
