"""What a model's parsers make of a conversation reaches the sampling parameters, within the limits of a request's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from triton_vllm.base.errors import InvalidRequestError, UnsupportedError
from triton_vllm.base.limits import USUAL, Limits
from triton_vllm.chat import conversations
from triton_vllm.chat.request import Chat
from triton_vllm.vllm_api import ParserNames

TOOL = {"type": "function", "function": {"name": "f"}}


def request(**values):
    return Chat(({"role": "user", "content": "hi"},), (TOOL,), **values)


class Parsers:
    """In place of vLLM's: a forced tool makes a constraint."""

    def __init__(self, tool="hermes", error=None, tag="{}"):
        self.names = ParserNames(tool, "r1")
        self.error = error
        self.tag = tag

    def open(self, chat, structured, *, stream):
        if self.error:
            raise self.error
        assert stream
        constraint = SimpleNamespace(structural_tag=self.tag) if chat["tool_choice"] == "required" else structured
        made = SimpleNamespace(structured=lambda: constraint, followed=[])
        made.decoding = lambda: {"skip_special_tokens": False} if chat["tool_choice"] != "none" else {}
        made.follow = lambda params: made.followed.append(params.skip_special_tokens)
        return made


def begun(parsers, given, limits=USUAL):
    params = SimpleNamespace(structured_outputs="own", skip_special_tokens=True)
    return conversations.begin(parsers, given, params, (ValueError,), limits, stream=True), params


def test_a_forced_tool_replaces_the_constraint():
    """And special tokens are kept for the parser."""
    found, params = begun(Parsers(), request(tool_choice="required"))
    assert found is not None
    assert found.followed == [False]  # what is decoded then
    assert (params.structured_outputs.structural_tag, params.skip_special_tokens) == ("{}", False)


def test_tools_are_no_way_around_the_limits_of_constraints():
    """They may be sixteen times as long as a schema."""
    with pytest.raises(InvalidRequestError, match=r"^tools: .*structured_outputs\.structural_tag has 9 characters"):
        begun(Parsers(tag='{"a": 12}'), request(tool_choice="required"), Limits(max_constraint_bytes=8))


@pytest.mark.parametrize(("parsers", "choice", "refused"), [
    (None, "auto", True), (None, "none", False), (None, None, False), (Parsers(""), "required", True), (Parsers(""), None, False),
])  # fmt: skip
def test_a_tool_choice_needs_a_parser(parsers, choice, refused):
    """Else a client would wait for tool calls that never come."""
    if not refused:
        assert (begun(parsers, request(tool_choice=choice))[0] is None) is (parsers is None)
        return
    with pytest.raises(UnsupportedError, match="tool_choice: this model has no tool_parser"):
        begun(parsers, request(tool_choice=choice))


def test_what_vllm_refuses_is_said_with_its_place():
    """Its errors are pydantic's, or plain."""
    error: Any = ValueError("all of it")
    with pytest.raises(InvalidRequestError, match="tools or tool_choice: all of it"):
        begun(Parsers(error=error), request())
    error.errors = lambda: [{"loc": ("tools", 0, "function"), "msg": "Field required"}]
    with pytest.raises(InvalidRequestError, match=r"tools or tool_choice: tools\.0\.function: Field required"):
        begun(Parsers(error=error), request())
