"""Check a conversation in a body: its messages, those of the other protocols, and its tools."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from triton_vllm.base.coerce import shown
from triton_vllm.base.errors import InvalidRequestError
from triton_vllm.base.limits import refuse_above
from triton_vllm.media.checks import check_parts
from triton_vllm.openai.refusal import FieldError, naming

if TYPE_CHECKING:
    from collections.abc import Mapping

    from triton_vllm.base.limits import Limits
    from triton_vllm.engine.fit import Fit
    from triton_vllm.openai.fields import Route

# Such a field or type holds a picture, a file, or the id of something that a server keeps. These
# are the words of all protocols, so what a newer vLLM adds is likely to have one of them.
_MEDIA = re.compile(
    r"(?:.*_)?(?:audio|document|embeds|file|image|pil|screenshot|source|url|uuid|video)s?(?:_.*)?",
    re.DOTALL,
)
_TAKEN = (
    "only texts, tool calls and their results are. "
    "Messages of chat completions may have pictures, audio and video"
)


def check_conversation(
    route: Route, body: Mapping[str, Any], fit: Fit
) -> tuple[Mapping[str, Any], ...]:
    """Check a conversation.

    Args:
        route: the path's rules.
        body: the body. It may lack any of its fields.
        fit: the model's limits, and what its engine takes.

    Returns:
        All messages if there is a picture, audio or video in one. Otherwise nothing.

    Raises:
        AdapterError: something in the conversation is refused.
    """
    limits = fit.limits
    # 1) Messages
    # The characters of each picture, audio and video in the messages
    media_lengths: list[int] = []
    # Tools that messages define
    added_tools: list[Any] = []
    messages = body.get("messages") or ()
    if messages:
        if not isinstance(messages, list) or not all(_is_message(item) for item in messages):
            raise FieldError(
                "messages", "messages must be a list of objects with 'role' and 'content'"
            )
        refuse_above(limits.max_messages, len(messages), "messages have", "entries")
        if route.media:
            media_lengths = check_parts(limits, messages)
        else:
            texts = _Texts(limits)
            for number, message in enumerate(messages):
                texts.check(message.get("content"), f"messages[{number}].content")
            added_tools = texts.tools
    if media_lengths:
        fit.check_media("messages")
    # 2) What the other protocols have in place of messages
    _Texts(limits).check(body.get("system"), "system")
    if isinstance(body.get("input"), list) and "input" in route.conversation:
        refuse_above(limits.max_messages, len(body["input"]), "input has", "entries")
        texts = _Texts(limits)
        for number, item in enumerate(body["input"]):
            # vLLM refuses an item that is not an object.
            for key in ("content", "output", "summary") if isinstance(item, dict) else ():
                texts.check(item.get(key), f"input[{number}].{key}")
    # 3) Tools, and the length of all that will be tokenized
    _check_tools(limits, body.get("tools") or [], added_tools)
    # The arguments of a template may be texts, too.
    fields = (*route.conversation, "chat_template_kwargs")
    characters = sum(characters_of(body.get(field)) for field in fields)
    # An error names the field with the messages.
    name = route.conversation[0]
    with naming(name):
        fit.check_text(characters - sum(media_lengths), name)
    return tuple(messages) if media_lengths else ()


def _check_tools(limits: Limits, tools: Any, added: list[Any]) -> None:
    """Check the number and size of a request's tools, with those that its messages add.

    vLLM runs none of them, so their kinds do not matter. Only its argument ``tool_server`` would
    make it run some. ``arguments.OURS`` refuses that argument.
    """
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise FieldError("tools", "tools must be a list of objects")
    tools = tools + added
    # A tool of type "namespace" has tools of its own.
    inner = [tool["tools"] for tool in tools if isinstance(tool.get("tools"), list)]
    count = len(tools) + sum(map(len, inner))
    refuse_above(limits.max_tools, count, "tools has", "entries")
    refuse_above(limits.max_parameter_bytes, len(json.dumps(tools)), "tools has", "bytes")


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and "role" in item


class _Texts:
    """Refuses contents that have anything but texts, tool calls and their results.

    Args:
        limits: the model's limits.

    Attributes:
        tools: the tools that the contents define. vLLM adds them to the request's own.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._count = 0
        self.tools: list[Any] = []

    def check(self, content: Any, name: str) -> None:
        """Check a content; its parts and those of the contents before count together.

        Args:
            content: a text, a part, or a list of parts. Others are left to vLLM.
            name: where it is in the body, for the error.

        Raises:
            InvalidRequestError: there are too many parts, or one is not a text, tool call or
                result.
        """
        if content is None or isinstance(content, str):
            return
        if not isinstance(content, list):
            content = [content]
        self._count += len(content)
        refuse_above(
            self._limits.max_parts, self._count, f"the contents up to {name} have", "parts"
        )
        for number, part in enumerate(content):
            # vLLM refuses the others, or takes them for texts.
            if isinstance(part, dict):
                self._check_part(part, f"{name}[{number}]")

    def _check_part(self, part: Mapping[str, Any], name: str) -> None:
        """Refuse a part with media; note a tool that it defines, and check its own content."""
        kind = part.get("type")
        if isinstance(kind, str) and _MEDIA.fullmatch(kind):
            raise InvalidRequestError(
                f"{name}: parts of type '{shown(kind)}' are not taken here; {_TAKEN}"
            )
        for key, value in part.items():
            # Clients write defaults, too: `"file_id": null`.
            if value is not None and _MEDIA.fullmatch(key):
                raise InvalidRequestError(f"{name}: '{shown(key)}' is not taken here; {_TAKEN}")
        # Anthropic's part `tool_addition`
        tool = part.get("tool")
        if isinstance(tool, dict) and isinstance(tool.get("definition"), dict):
            self.tools.append(tool["definition"])
        self.check(part.get("content"), f"{name}.content")


def characters_of(value: Any) -> int:
    """Return the length of all texts in a JSON value."""
    count = 0
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if isinstance(node, str):
            count += len(node)
        elif isinstance(node, dict):
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node
    return count
