"""Conversations in every form in which they can arrive, and tool choices."""

from __future__ import annotations

import json

import pytest

from triton_vllm.base.errors import InvalidRequestError
from triton_vllm.base.limits import USUAL
from triton_vllm.chat import request as chat

ONE = '{"role": "user", "content": "a"}'
TOOLS = json.dumps([{"type": "function", "function": {"name": name}} for name in ("get_time", "get_place")])
NAMED = {"type": "function", "function": {"name": "get_time"}}


@pytest.mark.parametrize(
    ("texts", "count"), [([f"[{ONE}]"], 1), ([f" [{ONE},{ONE}]"], 2), ([ONE], 1), ([f" {ONE}"], 1), ([ONE, ONE, ONE], 3)]
)
def test_messages_are_a_list_in_one_text_or_a_text_each(texts, count):
    """Triton's generate endpoint takes strings and lists of strings."""
    parsed = chat.parse(USUAL, {"messages": chat.joined(texts)})
    assert [dict(m) for m in parsed.messages] == [json.loads(ONE)] * count


@pytest.mark.parametrize("texts", [["[1]", ONE], ["", ONE], [ONE, "{"], ["{}"], [f"[{ONE}]", f"[{ONE}]"]])
def test_elements_that_are_no_messages_are_refused(texts):
    """The input is named."""
    with pytest.raises(InvalidRequestError, match=r"^messages "):
        chat.parse(USUAL, {"messages": chat.joined(texts)})


@pytest.mark.parametrize("given", ["none", "auto", "required", '"auto"', json.dumps(NAMED)])
def test_a_tool_choice_is_a_word_or_json(given):
    """A plain word needs no quotes."""
    parsed = chat.parse(USUAL, {"messages": f"[{ONE}]", "tools": TOOLS, "tool_choice": given})
    assert parsed.tool_choice == (NAMED if "get_time" in given else given.strip('"'))


@pytest.mark.parametrize(
    ("given", "tools", "says"),
    [
        ("auto", None, "tool_choice is auto, which needs tools"),
        ("required", "[]", "tool_choice is required, which needs tools"),
        ("any", TOOLS, "tool_choice is not valid JSON"),
        ("1", TOOLS, "tool_choice must be none, auto, required or"),
        ('{"type": "function"}', TOOLS, "tool_choice must be none, auto, required or"),
        ('{"type": "function", "function": {"name": "get_tim"}}', TOOLS, "no function 'get_tim', did you mean 'get_time'"),
        (json.dumps(NAMED), '[{"type": "function", "function": []}]', "the tools have no function 'get_time'"),
    ],
)  # fmt: skip
def test_a_wrong_tool_choice_is_refused(given, tools, says):
    """By name, with the reason."""
    texts = {"messages": f"[{ONE}]", "tool_choice": given, **({"tools": tools} if tools else {})}
    with pytest.raises(InvalidRequestError) as refused:
        chat.parse(USUAL, texts)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("given", "reasoning"),
    [({"reasoning_content": "old"}, "old"), ({"reasoning_content": "old", "reasoning": None}, "old"),
     ({"reasoning_content": "old", "reasoning": "new"}, "new"), ({"reasoning": "new"}, "new"), ({}, None)],
)  # fmt: skip
def test_earlier_reasoning_has_two_names(given, reasoning):
    """Templates get it under the newer one."""
    message = {"role": "assistant", "content": "a", **given}
    (parsed,) = chat.parse(USUAL, {"messages": json.dumps([message])}).messages
    assert parsed.get("reasoning") == reasoning


def test_a_message_is_either_continued_or_answered():
    """The template could not do both."""
    both = '{"continue_final_message": true, "add_generation_prompt": true}'
    with pytest.raises(InvalidRequestError, match="exclude each other"):
        chat.parse(USUAL, {"messages": f"[{ONE}]", "chat_template_kwargs": both})


def test_an_integer_that_vllms_processes_cannot_hand_on_is_refused():
    """vLLM would fail where it sends the request, and keep its half."""
    for number, refused in ((2**63 - 1, False), (2**63, True), (-(2**70), True)):
        texts = {"messages": f"[{ONE}]", "chat_template_kwargs": json.dumps({"thinking_budget": {"a": [number]}})}
        if not refused:
            assert chat.parse(USUAL, texts).template_kwargs["thinking_budget"] == {"a": [number]}
            continue
        with pytest.raises(InvalidRequestError, match="chat_template_kwargs holds an integer of more than 64 bits"):
            chat.parse(USUAL, texts)
