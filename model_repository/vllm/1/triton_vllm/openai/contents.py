"""Check the content of a body before vLLM reads it: fields, texts, constraints.

``conversation`` checks the messages.
"""

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
from triton_vllm.openai.conversation import characters_of, check_conversation
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
        for text in _check_prompts(fit, name, body[name])
    ]
    # vLLM cuts such texts to this number of tokens, so only very long ones must be counted.
    if body.get("truncate_prompt_tokens") is not None:
        texts = [text for text in texts if len(text) > CUT_AT_MOST]
    _check_completions(route, body, fit)
    # 3) A conversation
    messages_with_media: tuple[Mapping[str, Any], ...] = ()
    if route.conversation:
        messages_with_media = check_conversation(route, body, fit)
    # 4) Other fields
    lists = tuple(
        Listed(kind, name, body[name], most)
        for name, most in route.unions.items()
        if isinstance(body.get(name), list)
    )
    if body.get("instruction") is not None:
        _check_instruction(body, fit)
    if "chat_template_kwargs" in body:
        _check_template_kwargs(limits, body["chat_template_kwargs"])
    return Content(
        model=body.get("model"),
        constraint=_check_constraint(limits, body),
        texts=tuple(texts),
        messages=messages_with_media,
        lists=lists,
    )


def _check_fields(route: Route, body: Mapping[str, Any]) -> None:
    """Refuse the fields that no request to this path may set."""
    for name, value in body.items():
        reason = route.refused.get(name) or REFUSED.get(name)
        # Clients write defaults, too: `"use_beam_search": false`.
        if reason and value is not None and value is not False:
            raise FieldError(name, f"'{name}' is not taken from a request: {reason}")


def _check_amounts(route: Route, body: Mapping[str, Any], fit: Fit) -> None:
    """Bound what vLLM would look at value by value, and answer with an error for each.

    These are lists of token ids, and all fields that have no check of their own.
    """
    # vLLM's answer contains the model's name.
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
                    fit.check_token_ids(name, _token_ids(name, value, fit.facts))
            continue
        has_own_check = name in _LARGE or name in route.prompts or name in route.conversation
        if not has_own_check:
            count = count_values(value, MOST_VALUES)
            refuse_above(MOST_VALUES, count, f"'{shown(name)}' has", "values or more")


def _token_ids(name: str, value: Any, facts: Facts) -> list[int]:
    """Return the token ids in a field of ``TOKEN_IDS``.

    ``logit_bias`` is an object with a number for each id. The others are lists of ids.

    Raises:
        InvalidRequestError: the field is neither, or has more entries than the model has tokens.
    """
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


def _check_prompts(fit: Fit, name: str, value: Any) -> Iterator[str]:
    """Check a field with a text, token ids, or a list of them; yield each prompt that is a text.

    Raises:
        InvalidRequestError: the field has another type or too many prompts, or one does not fit.
    """
    several = isinstance(value, list) and not _are_ids(value)
    if several:
        refuse_above(fit.limits.max_inputs, len(value), f"{name} has", "inputs")
    for prompt in value if several else [value]:
        with naming(name):
            if isinstance(prompt, str):
                fit.check_text(len(prompt), _prompt_name(name))
            elif isinstance(prompt, list) and _are_ids(prompt):
                fit.check_ids(prompt, _prompt_name(name))
            else:
                raise InvalidRequestError(f"'{name}' must be a text, token ids, or a list of them")
        if isinstance(prompt, str):
            yield prompt


def _prompt_name(field: str) -> str:
    """Return what an error calls a prompt in this field."""
    return PROMPT_NAME if field == "prompt" else field


def _check_completions(route: Route, body: Mapping[str, Any], fit: Fit) -> None:
    """Refuse more prompts times completions than there is room for.

    Without this, vLLM would begin to work on the first prompts before one is refused.
    """
    # Prompts in other fields, as for scores, are counted when the application asks vLLM for them.
    prompts = body.get(route.prompts[0]) if route.prompts else None
    count = len(prompts) if isinstance(prompts, list) and not _are_ids(prompts) else 1
    n = body.get("n")
    asked = count * n if type(n) is int else count
    # The ledger has counted one for the request.
    fit.check_weight(asked, ASKED, UNIT, counted=1)


def _are_ids(value: list[Any]) -> bool:
    return all(type(item) is int for item in value)


def _check_instruction(body: Mapping[str, Any], fit: Fit) -> None:
    """Check what vLLM adds to each pair of texts before it tokenizes the pair."""
    given = [body.get("instruction"), body.get("chat_template_kwargs")]
    with naming("instruction"):
        fit.check_text(sum(map(characters_of, given)), "instruction")


def _check_template_kwargs(limits: Limits, kwargs: Any) -> None:
    """Refuse arguments of the chat template that are too large, or that a request may not set.

    ``kwargs`` is the field's value, which may be of any type.
    """
    if kwargs is None:
        return
    if not isinstance(kwargs, dict):
        raise FieldError("chat_template_kwargs", "chat_template_kwargs must be an object")
    size = len(json.dumps(kwargs))
    refuse_above(limits.max_parameter_bytes, size, "chat_template_kwargs has", "bytes")
    check_template_kwargs(limits, kwargs)


def _check_constraint(limits: Limits, body: Mapping[str, Any]) -> Constraint | None:
    """Check the size of a request's constraint; return it if it must be tried.

    A constraint is tried by compiling it in a separate process. None means that none need be tried.

    Raises:
        InvalidRequestError: a field of the constraint is wrong or too large.
    """
    # vLLM's parameters for structured outputs, whichever field of the body they come from
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
