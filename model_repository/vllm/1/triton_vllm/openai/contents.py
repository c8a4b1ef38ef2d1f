"""Check the content of a body before vLLM reads it: fields, texts, media, constraints."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from triton_vllm.base.coerce import shown
from triton_vllm.base.errors import InvalidRequestError
from triton_vllm.base.limits import TOKEN_IDS, refuse_above
from triton_vllm.chat.request import check_template_kwargs
from triton_vllm.constraints import checks as constraints
from triton_vllm.engine.fit import PROMPT_NAME
from triton_vllm.media.checks import check_parts
from triton_vllm.openai.fields import REFUSED
from triton_vllm.openai.items import Listed, count_values
from triton_vllm.openai.refusal import FieldError, naming
from triton_vllm.request.sampling import response_format

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from triton_vllm.base.limits import Limits
    from triton_vllm.constraints.checks import Constraint
    from triton_vllm.engine.fit import Fit
    from triton_vllm.openai.fields import Route
    from triton_vllm.vllm_api import BodyType, Facts

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
ASKED = "the request asks for"
UNIT = "completions or inputs"
"""The words for a request's weight: its prompts and completions are counted together."""
MOST_CHARACTERS = 1024
"""The most characters of the model's name."""
MOST_VALUES = 1024
"""The most JSON values of a field that is not among those below, a prompt, or a conversation."""
# Each has checks of its own.
_LARGE = frozenset({
    "chat_template_kwargs", "output_config", "response_format", "structured_outputs", "text",
    "tools",
})  # fmt: skip
# As vLLM reads them. Python's int() refuses very long ones.
_ID = re.compile(r"\s*[+-]?\d{1,20}\s*")
_CONSTRAINT = frozenset({
    "choice", "disable_additional_properties", "disable_any_whitespace", "disable_fallback",
    "grammar", "json", "json_object", "regex", "structural_tag", "whitespace_pattern",
})  # fmt: skip


# A tokenizer takes about 0.05 s for so many characters.
CUT_AT_MOST = 65_536
"""The most characters of a text that vLLM may tokenize only to cut it."""


@dataclass(frozen=True)
class Content:
    """What is left to check when the engine can be asked.

    Attributes:
        model: the model's name. It may be of any type.
        constraint: the constraint to try, or None.
        texts: the texts whose tokens must be counted.
        messages: the messages that have media.
        lists: the lists whose items must be compared with many kinds.
    """

    model: Any = None
    constraint: Constraint | None = None
    texts: tuple[str, ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    lists: tuple[Listed, ...] = ()


def check(route: Route, kind: BodyType, body: Mapping[str, Any], fit: Fit) -> Content:
    """Check what can be checked at once; return what is still to be checked.

    Args:
        route: the path's rules.
        kind: vLLM's classes for bodies of this path.
        body: the parsed body, with no fields but those that vLLM has.
        fit: the model's limits, and what its engine takes.

    Raises:
        AdapterError: something in the body is refused. The text names the field.
    """
    limits = fit.limits
    # 1) Fields and amounts
    _check_fields(route, body)
    _check_amounts(route, body, fit)
    # 2) Prompts
    texts = [
        text
        for name in route.prompts
        if body.get(name) is not None
        for text in _prompts(fit, name, body[name])
    ]
    # vLLM cuts such texts to this number of tokens, so only very long ones must be counted.
    if body.get("truncate_prompt_tokens") is not None:
        texts = [text for text in texts if len(text) > CUT_AT_MOST]
    _check_completions(route, body, fit)
    # 3) A conversation
    messages_with_media: tuple[Mapping[str, Any], ...] = ()
    if route.conversation:
        messages_with_media = _conversation(route, body, fit)
    # 4) Other fields
    lists = tuple(
        Listed(kind, name, body[name], most)
        for name, most in route.unions.items()
        if isinstance(body.get(name), list)
    )
    if body.get("instruction") is not None:
        _instruction(body, fit)
    if "chat_template_kwargs" in body:
        _template_kwargs(limits, body["chat_template_kwargs"])
    return Content(
        model=body.get("model"),
        constraint=_constraint(limits, body),
        texts=tuple(texts),
        messages=messages_with_media,
        lists=lists,
    )


def _check_fields(route: Route, body: Mapping[str, Any]) -> None:
    for name, value in body.items():
        reason = route.refused.get(name) or REFUSED.get(name)
        # Clients write defaults, too: `"use_beam_search": false`.
        if reason and value is not None and value is not False:
            raise FieldError(name, f"'{name}' is not taken from a request: {reason}")


def _check_amounts(route: Route, body: Mapping[str, Any], fit: Fit) -> None:
    """Bound what vLLM would look at value by value, and answer with an error for each."""
    # vLLM has the name in its answer.
    if isinstance(body.get("model"), str):
        refuse_above(MOST_CHARACTERS, len(body["model"]), "'model' has", "characters")
    # For a streamed response, vLLM would refuse it after the start of the stream.
    if type(body.get("top_logprobs")) is int:
        with naming("top_logprobs"):
            fit.check_logprobs("top_logprobs", body["top_logprobs"])
    for name, value in body.items():
        if name in TOKEN_IDS:
            if value:
                with naming(name):
                    fit.check_token_ids(name, _ids(name, value, fit.facts))
        elif not (name in _LARGE or name in route.prompts or name in route.conversation):
            count = count_values(value, MOST_VALUES)
            refuse_above(MOST_VALUES, count, f"'{shown(name)}' has", "values or more")


def _ids(name: str, value: Any, facts: Facts) -> list[int]:
    """Return the token ids of a field: a list of them, or an object with a number for each."""
    if name != "logit_bias":
        if isinstance(value, list) and _are_ids(value):
            return value
        raise FieldError(name, f"'{name}' must be a list of token ids")
    if isinstance(value, dict):
        refuse_above(facts.vocabulary, len(value), "'logit_bias' has", "entries")
        are_numbers = all(type(number) in (int, float) for number in value.values())
        if are_numbers and all(map(_ID.fullmatch, value)):
            return [int(key) for key in value]
    raise FieldError(name, "'logit_bias' must be an object with a number for each token id")


def _prompts(fit: Fit, name: str, value: Any) -> Iterator[str]:
    """Yield the texts of a field with a text, tokens, or a list of them."""
    several = isinstance(value, list) and not _are_ids(value)
    if several:
        refuse_above(fit.limits.max_inputs, len(value), f"{name} has", "inputs")
    for prompt in value if several else [value]:
        with naming(name):
            if isinstance(prompt, str):
                fit.check_text(len(prompt), _called(name))
            elif isinstance(prompt, list) and _are_ids(prompt):
                fit.check_ids(prompt, _called(name))
            else:
                raise InvalidRequestError(f"'{name}' must be a text, token ids, or a list of them")
        if isinstance(prompt, str):
            yield prompt


def _called(field: str) -> str:
    return PROMPT_NAME if field == "prompt" else field


def _check_completions(route: Route, body: Mapping[str, Any], fit: Fit) -> None:
    """Refuse what there is no room for. vLLM would begin to work on the first prompts."""
    prompts = body.get(route.prompts[0]) if route.prompts else None
    count = len(prompts) if isinstance(prompts, list) and not _are_ids(prompts) else 1
    n = body.get("n")
    asked = count * n if type(n) is int else count
    # The ledger has one.
    fit.check_weight(asked, ASKED, UNIT, counted=1)


def _are_ids(value: list[Any]) -> bool:
    return all(type(item) is int for item in value)


def _instruction(body: Mapping[str, Any], fit: Fit) -> None:
    """Check what vLLM adds to each pair of texts before it tokenizes the pair."""
    given = [body.get("instruction"), body.get("chat_template_kwargs")]
    with naming("instruction"):
        fit.check_text(sum(map(_characters, given)), "instruction")


def _conversation(route: Route, body: Mapping[str, Any], fit: Fit) -> tuple[Mapping[str, Any], ...]:
    """Check a conversation; return its messages if they have media."""
    limits = fit.limits
    # 1) Messages
    lengths: list[int] = []
    added: list[Any] = []
    messages = body.get("messages") or ()
    if messages:
        if not isinstance(messages, list) or not all(_is_message(item) for item in messages):
            raise FieldError(
                "messages", "messages must be a list of objects with 'role' and 'content'"
            )
        refuse_above(limits.max_messages, len(messages), "messages have", "entries")
        if route.media:
            lengths = check_parts(limits, messages)
        else:
            texts = _Texts(limits)
            for number, message in enumerate(messages):
                texts.check(message.get("content"), f"messages[{number}].content")
            added = texts.tools
    if lengths:
        fit.check_media("messages")
    # 2) What the other protocols have in place of messages
    _Texts(limits).check(body.get("system"), "system")
    if isinstance(body.get("input"), list) and "input" in route.conversation:
        refuse_above(limits.max_messages, len(body["input"]), "input has", "entries")
        texts = _Texts(limits)
        for number, item in enumerate(body["input"]):
            # vLLM refuses the others.
            for key in ("content", "output", "summary") if isinstance(item, dict) else ():
                texts.check(item.get(key), f"input[{number}].{key}")
    # 3) The rest
    _check_tools(limits, body.get("tools") or [], added)
    # The arguments of a template may be texts, too.
    prompt = (*route.conversation, "chat_template_kwargs")
    characters = sum(_characters(body.get(name)) for name in prompt)
    name = route.conversation[0]
    with naming(name):
        fit.check_text(characters - sum(lengths), name)
    return tuple(messages) if lengths else ()


def _check_tools(limits: Limits, tools: Any, added: list[Any]) -> None:
    """Check the size of tools, with those that messages add.

    vLLM runs none of them, so their kinds do not matter.

    Only its argument ``tool_server`` would make it run some. ``arguments.OURS`` refuses it.
    """
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise FieldError("tools", "tools must be a list of objects")
    tools = tools + added
    # A namespace has tools of its own.
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
        """Check a content; its parts and those of the contents before count together."""
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
                self._part(part, f"{name}[{number}]")

    def _part(self, part: Mapping[str, Any], name: str) -> None:
        kind = part.get("type")
        if isinstance(kind, str) and _MEDIA.fullmatch(kind):
            raise InvalidRequestError(
                f"{name}: parts of type '{shown(kind)}' are not taken here; {_TAKEN}"
            )
        for key, value in part.items():
            # Clients write defaults, too: `"file_id": null`.
            if value is not None and _MEDIA.fullmatch(key):
                raise InvalidRequestError(f"{name}: '{shown(key)}' is not taken here; {_TAKEN}")
        # Anthropic's `tool_addition`
        tool = part.get("tool")
        if isinstance(tool, dict) and isinstance(tool.get("definition"), dict):
            self.tools.append(tool["definition"])
        self.check(part.get("content"), f"{name}.content")


def _characters(value: Any) -> int:
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


def _template_kwargs(limits: Limits, kwargs: Any) -> None:
    if kwargs is None:
        return
    if not isinstance(kwargs, dict):
        raise FieldError("chat_template_kwargs", "chat_template_kwargs must be an object")
    size = len(json.dumps(kwargs))
    refuse_above(limits.max_parameter_bytes, size, "chat_template_kwargs has", "bytes")
    check_template_kwargs(limits, kwargs)


def _constraint(limits: Limits, body: Mapping[str, Any]) -> Constraint | None:
    """Check the size of a request's constraint; return it if it must be tried."""
    fields: dict[str, Any] = {}
    if body.get("response_format") is not None:
        fields |= response_format(body["response_format"])
    for name in ("text", "output_config"):
        wanted = body.get(name)
        form = wanted.get("format") if isinstance(wanted, dict) else None
        if form is not None:
            fields |= _constraint_of_format(name, form)
    given = body.get("structured_outputs")
    if given is not None:
        if not isinstance(given, dict) or not given.keys() <= _CONSTRAINT:
            names = ", ".join(sorted(_CONSTRAINT))
            raise FieldError(
                "structured_outputs", f"structured_outputs must be an object with some of {names}"
            )
        fields |= {name: value for name, value in given.items() if value is not None}
    if not fields:
        return None
    constraints.check(limits, fields)
    return constraints.to_compile(limits, SimpleNamespace(**fields))


def _constraint_of_format(name: str, form: Any) -> dict[str, Any]:
    """Return the constraint in a ``format``, which is empty if no size need be checked.

    Args:
        name: the field with the format. OpenAI's Responses have it in ``text``, and Anthropic's
            Messages in ``output_config``.
        form: the format's value.

    Raises:
        FieldError: the format has another type, or no schema.
    """
    kind = form.get("type") if isinstance(form, dict) else None
    # Neither has a schema.
    if kind in ("text", "json_object"):
        return {}
    schema = form.get("schema") if kind == "json_schema" else None
    if not isinstance(schema, dict):
        raise FieldError(name, f"{name}.format must be of type text, json_object or json_schema")
    return {"json": schema}
