"""Parse a conversation: messages, tools and the other inputs of the model's chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from triton_vllm.base.coerce import closest, shown
from triton_vllm.base.document import check_integers, json_object, json_value
from triton_vllm.base.errors import InvalidRequestError
from triton_vllm.base.limits import refuse_above
from triton_vllm.media.checks import check_parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triton_vllm.base.limits import Limits

CHAT_INPUTS = ("tools", "tool_choice", "chat_template_kwargs")
TOOL_CHOICES = ("none", "auto", "required")
NAMED_TOOL = '{"type": "function", "function": {"name": "…"}}'
_DATA = re.compile(r'"(?i:data):[^"]*|"data" *: *"[^"]*')
"""Matches a picture, audio or video in JSON."""
_TEXT = "messages have, without pictures, audios and videos,"


@dataclass(frozen=True)
class Chat:
    """A conversation for the model's chat template.

    Attributes:
        messages: the messages.
        tools: the tools. None for a chat without tools.
        template_kwargs: additional arguments of the template.
        characters: the length of messages and tools as JSON. Pictures, audios and videos do not
            count.
        media: whether the messages contain pictures, audios or videos.
        tool_choice: none, auto, required, or an object that names a function, as in the OpenAI
            protocol.
        parallel_tool_calls: the OpenAI protocol's field.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    characters: int = 0
    media: bool = False
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    def fields(self) -> dict[str, Any]:
        """Return the conversation as the fields of a chat request in the OpenAI protocol."""
        return {
            "messages": list(map(dict, self.messages)),
            "tools": list(map(dict, self.tools)) if self.tools else None,
            "tool_choice": self.tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "chat_template_kwargs": self.template_kwargs,
        }


def parse(limits: Limits, texts: Mapping[str, str]) -> Chat:
    """Return the conversation of a request.

    Args:
        limits: the model's limits.
        texts: the conversation's inputs as JSON.

    Raises:
        InvalidRequestError: an input is wrong. The message names it, the reason and a right value.
    """
    messages, media_lengths = _messages(limits, texts["messages"])
    tools = None
    kwargs: Mapping[str, Any] = {}
    choice = None
    if "tools" in texts:
        tools = _tools(limits, texts["tools"])
    if "chat_template_kwargs" in texts:
        kwargs = _kwargs(limits, texts["chat_template_kwargs"])
    if "tool_choice" in texts:
        choice = _choice(limits, texts["tool_choice"], tools or ())
    return Chat(
        messages=tuple(messages),
        tools=tools,
        template_kwargs=kwargs,
        characters=len(texts["messages"]) - sum(media_lengths) + len(texts.get("tools", "")),
        media=bool(media_lengths),
        tool_choice=choice,
    )


def joined(texts: Sequence[str]) -> str:
    """Return a conversation's JSON list.

    Args:
        texts: one text with the list or with an object, or one text for each message.
    """
    if len(texts) == 1 and not texts[0].lstrip().startswith("{"):
        return texts[0]
    return f"[{','.join(texts)}]"


def _messages(limits: Limits, text: str) -> tuple[list[Mapping[str, Any]], list[int]]:
    """Return the messages in a JSON text, and the length of each picture, audio and video in them.

    Raises:
        InvalidRequestError: they are malformed, or exceed a limit.
    """
    # 1) Cheap checks come first, so that a huge text is never parsed. Media do not count as text.
    if 0 < limits.max_text_bytes < len(text):
        media_length = sum(map(len, _DATA.findall(text)))
        refuse_above(limits.max_text_bytes, len(text) - media_length, _TEXT, "characters")
    refuse_above(limits.max_messages, text.count('"role"'), "messages have", "roles")
    # 2) Parse, and check exactly.
    messages = json_value(text, "messages", limits.max_json_depth)
    is_list = isinstance(messages, list) and messages
    if not is_list or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise InvalidRequestError(
            "messages must be a non-empty JSON list of objects with 'role' and 'content'"
        )
    refuse_above(limits.max_messages, len(messages), "messages have", "entries")
    media_lengths = check_parts(limits, messages)
    refuse_above(limits.max_text_bytes, len(text) - sum(media_lengths), _TEXT, "characters")
    # 3) Rename a field: vLLM's renderer ignores its older name, `reasoning_content`.
    for message in messages:
        if message.get("reasoning") is None and "reasoning_content" in message:
            message["reasoning"] = message["reasoning_content"]
    return messages, media_lengths


def _tools(limits: Limits, text: str) -> tuple[Mapping[str, Any], ...] | None:
    """Return the tools in a JSON text; None for null or an empty list."""
    tools = json_value(text, "tools", limits.max_json_depth)
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidRequestError("tools must be a JSON list of objects")
    refuse_above(limits.max_tools, len(tools), "tools has", "entries")
    return tuple(tools) or None


def _choice(
    limits: Limits, text: str, tools: Sequence[Mapping[str, Any]]
) -> str | Mapping[str, Any] | None:
    """Return the tool choice, from a plain word or JSON; None for null.

    Raises:
        InvalidRequestError: it is malformed, or names a function that the tools lack.
    """
    # A word may come without the quotes that JSON would need.
    is_word = text in TOOL_CHOICES
    choice = text if is_word else json_value(text, "tool_choice", limits.max_json_depth)
    if choice is None:
        return None
    if choice in ("auto", "required") and not tools:
        raise InvalidRequestError(
            f"tool_choice is {choice}, which needs tools, and the request has none"
        )
    if choice in TOOL_CHOICES:
        return str(choice)
    # A client may send further fields with the function. Only its name goes to vLLM.
    name = _function_name(choice)
    if name is None:
        raise InvalidRequestError(f"tool_choice must be {', '.join(TOOL_CHOICES)} or {NAMED_TOOL}")
    known = [own for own in map(_function_name, tools) if own is not None]
    if name not in known:
        raise InvalidRequestError(
            f"tool_choice: the tools have no function '{shown(name)}'{closest(name, known)}"
        )
    return {"type": "function", "function": {"name": name}}


def _function_name(value: Any) -> str | None:
    """Return the name of the function in a tool or tool choice; None if it is malformed."""
    if not isinstance(value, dict) or value.get("type", "function") != "function":
        return None
    function = value.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _kwargs(limits: Limits, text: str) -> dict[str, Any]:
    kwargs = json_object(text, "chat_template_kwargs", limits.max_json_depth)
    check_template_kwargs(limits, kwargs)
    return kwargs


def check_template_kwargs(limits: Limits, kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments of the chat template that a request must not set.

    Raises:
        InvalidRequestError: there is such an argument. The text names it.
    """
    # EngineCore gets them too, for its parser of reasoning.
    check_integers(kwargs, "chat_template_kwargs")
    known = limits.allowed_chat_template_kwargs
    if kwargs.get("continue_final_message") and kwargs.get("add_generation_prompt"):
        raise InvalidRequestError(
            "chat_template_kwargs: continue_final_message and add_generation_prompt "
            "exclude each other"
        )
    for name in kwargs:
        # A template is a program, which could run in the server for any time.
        if name == "chat_template":
            raise InvalidRequestError(
                "chat_template_kwargs cannot hold a chat_template; the model's own is used"
            )
        # vLLM passes some of them to the tokenizer, which then pads to any length.
        if name not in known:
            raise InvalidRequestError(
                f"chat_template_kwargs cannot hold '{shown(name)}'{closest(name, known)}"
            )
