"""Parse a conversation: messages, tools and what goes to the model's chat template besides."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from triton_vllm.admission.document import json_object, json_value
from triton_vllm.admission.limits import refuse_above
from triton_vllm.admission.media import check_parts
from triton_vllm.coerce import closest, shown
from triton_vllm.errors import InvalidRequestError
from triton_vllm.request import Chat

if TYPE_CHECKING:
    from collections.abc import Mapping

    from triton_vllm.admission.limits import Limits

INPUTS = ("messages", "tools", "chat_template_kwargs")
_DATA = re.compile(r'"(?i:data):[^"]*|"data" *: *"[^"]*')
"""A picture, audio or video in JSON."""


def parse(limits: Limits, texts: Mapping[str, str]) -> Chat:
    """Return a conversation.

    Args:
        limits: the model's.
        texts: its inputs as JSON.

    Raises:
        InvalidRequestError: with the name of the input, the reason and what is expected.
    """
    messages, media = _messages(limits, texts["messages"])
    tools = _tools(limits, texts["tools"]) if "tools" in texts else None
    kwargs = _kwargs(limits, texts["chat_template_kwargs"]) if "chat_template_kwargs" in texts else {}
    characters = len(texts["messages"]) - sum(media) + len(texts.get("tools", ""))
    return Chat(tuple(messages), tuple(tools) if tools else None, kwargs, characters, bool(media))


def _messages(limits: Limits, text: str) -> tuple[list[Mapping[str, Any]], list[int]]:
    """Return the messages, and the characters of each picture, audio and video in them."""
    if 0 < limits.max_text_bytes < len(text):
        rest = len(text) - sum(len(found) for found in _DATA.findall(text))
        refuse_above(limits.max_text_bytes, rest, "messages have, without pictures, audios and videos,", "characters")
    refuse_above(limits.max_messages, text.count('"role"'), "messages have", "roles")
    messages = json_value(text, "messages", limits.max_json_depth)
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise InvalidRequestError("messages must be a non-empty JSON list of objects with 'role' and 'content'")
    refuse_above(limits.max_messages, len(messages), "messages have", "entries")
    media = check_parts(limits, messages)
    rest = len(text) - sum(media)
    refuse_above(limits.max_text_bytes, rest, "messages have, without pictures, audios and videos,", "characters")
    return messages, media


def _tools(limits: Limits, text: str) -> list[Mapping[str, Any]] | None:
    tools = json_value(text, "tools", limits.max_json_depth)
    if tools is None:
        return None
    if not (isinstance(tools, list) and all(isinstance(t, dict) for t in tools)):
        raise InvalidRequestError("tools must be a JSON list of objects")
    refuse_above(limits.max_tools, len(tools), "tools has", "entries")
    return tools


def _kwargs(limits: Limits, text: str) -> dict[str, Any]:
    kwargs = json_object(text, "chat_template_kwargs", limits.max_json_depth)
    known = limits.allowed_chat_template_kwargs
    for name in kwargs:
        if name == "chat_template":  # a program, which would run in the server for as long as it likes
            raise InvalidRequestError("chat_template_kwargs cannot hold a chat_template; the model's own is used")
        if name not in known:  # vLLM hands some of them to the tokenizer, which then pads to any length
            raise InvalidRequestError(f"chat_template_kwargs cannot hold '{shown(name)}'{closest(name, known)}")
    return kwargs
