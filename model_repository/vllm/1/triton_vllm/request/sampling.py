"""Convert the JSON sampling parameters of a request to vLLM's SamplingParams."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from triton_vllm.base.coerce import closest, coerce, shown
from triton_vllm.base.document import check_integers
from triton_vllm.base.errors import InvalidRequestError
from triton_vllm.base.limits import USUAL
from triton_vllm.constraints import checks as constraints

if TYPE_CHECKING:
    from collections.abc import Mapping

    from triton_vllm.base.limits import Limits
    from triton_vllm.vllm_api import ChatDefaults, Schema

# Only the adapter or vLLM itself sets these, never a client.
INTERNAL = frozenset({"output_kind", "skip_clone", "output_text_buffer_length", "extra_args"})
# That line only counts the errors; the reasons follow.
_COUNT_LINE = re.compile(r"\d+ validation errors? for \w+\n")
"""Matches the first line of pydantic's errors."""
# The official backend and older vLLM have a parameter for each, such as ``guided_json``.
GUIDED = ("json", "regex", "choice", "grammar", "json_object", "whitespace_pattern")
"""Fields of a constraint that a request may also give as parameters, after ``guided_``."""
# Since vLLM 0.11 these hold for the whole engine, so a request cannot set them.
ENGINE_WIDE = ("backend", "_backend", "backend_was_auto", "_backend_was_auto")
"""Fields of a constraint that are ignored."""


def build(
    schema: Schema,
    parameters: Mapping[str, Any],
    *,
    stream: bool,
    limits: Limits = USUAL,
    chat: ChatDefaults | None = None,
) -> Any:
    """Return SamplingParams for a request.

    Args:
        schema: this vLLM's parameters.
        parameters: the request's parameters.
        stream: whether the answer is streamed.
        limits: the model's limits of constraints.
        chat: the defaults for a conversation. None for a text or tokens.

    Raises:
        InvalidRequestError: a parameter is unknown or of the wrong type, or vLLM refuses its value.
    """
    values = _structured(schema, dict(parameters), limits)
    if chat is not None:
        # The OpenAI protocol's newer name takes precedence if a request has both.
        newer = values.pop("max_completion_tokens", None)
        if newer is not None:
            hint = schema.types["max_tokens"]
            values["max_tokens"] = _coerced(schema, "max_completion_tokens", newer, hint)
    checked = {name: _checked(schema, name, value) for name, value in values.items()}
    if chat is not None:
        # The request's values take precedence over the model's defaults. `None` means as many
        # tokens as fit.
        checked = {"max_tokens": None, **chat.values, **checked}
        # The operator's limit, which holds whatever the request asks for.
        if chat.most is not None:
            tokens = checked["max_tokens"]
            checked["max_tokens"] = chat.most if tokens is None else min(chat.most, tokens)
    # A stream gets only new tokens. A whole answer comes at the end, in one output.
    checked["output_kind"] = schema.streaming if stream else schema.whole
    try:
        return schema.make(**schema.fixed, **checked)
    except schema.refusals as error:
        raise InvalidRequestError(f"sampling parameters: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """Return the message of vLLM's exception, on one line."""
    text, counted = _COUNT_LINE.subn("", str(error).strip())
    if not counted:
        return text.partition("\n")[0]
    # Pydantic adds the type, the value and a web address after the first reason.
    return " ".join(text.partition(" [type=")[0].split())


def _checked(schema: Schema, name: str, value: Any) -> Any:
    """Return a parameter's value as the type that vLLM declares for it.

    Raises:
        InvalidRequestError: vLLM does not have the parameter, or the value does not fit.
    """
    if name not in schema.types or name in INTERNAL:
        known = [known for known in schema.types if known not in INTERNAL]
        raise InvalidRequestError(
            f"unknown sampling parameter '{shown(name)}'{closest(name, known)}"
        )
    # ``_structured`` has already turned a constraint into vLLM's object, and checked its fields.
    if name == schema.structured_name and isinstance(value, schema.structured):
        return value
    # vLLM declares some objects without the types of their values. ``coerce`` then lets integers of
    # more than 64 bits pass.
    if isinstance(value, dict):
        check_integers(value, f"sampling parameter '{name}'")
    return _coerced(schema, name, value, schema.types[name])


def _coerced(schema: Schema, name: str, value: Any, hint: Any) -> Any:
    """Return a value as the type ``hint``; ``name`` is the parameter's name in an error.

    Raises:
        InvalidRequestError: the value does not fit, or vLLM refuses it.
    """
    try:
        return coerce(value, hint)
    except ValueError as error:
        reason = _reason(error)
    except schema.refusals as error:
        # vLLM's own exceptions are not ValueErrors.
        reason = f"is refused by vLLM: {_reason(error)}"
    raise InvalidRequestError(f"sampling parameter '{name}' {reason}")


def _structured(schema: Schema, values: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """Replace each spelling of a structured-output constraint by the one that this vLLM takes.

    Args:
        schema: this vLLM's parameters.
        values: the request's parameters. Changed in place, and returned.
        limits: the model's limits of constraints.
    """
    # A later spelling takes precedence, field by field.
    constraint = {
        name: values.pop(f"guided_{name}") for name in GUIDED if f"guided_{name}" in values
    }
    if "response_format" in values:
        constraint |= response_format(values.pop("response_format"))
    for name in ("structured_outputs", "guided_decoding"):
        if name in values:
            constraint |= _object(values.pop(name), name)
    for name in ENGINE_WIDE:
        constraint.pop(name, None)
    # Triton's OpenAI frontend sends every field of its own vLLM's class, and newer vLLM does not
    # have this one.
    if not constraint.get("disable_fallback"):
        constraint.pop("disable_fallback", None)
    # vLLM would count a false as a constraint, and then find none.
    if constraint.get("json_object") in (False, "false"):
        del constraint["json_object"]
    if constraint:
        values[schema.structured_name] = _constraint(schema, constraint, limits)
    return values


def _constraint(schema: Schema, fields: dict[str, Any], limits: Limits) -> Any:
    """Return vLLM's object for a structured-output constraint with these fields.

    Raises:
        InvalidRequestError: the constraint is malformed or exceeds a limit.
    """
    if "choice" in fields:
        # A string is the JSON of a list, or the only choice.
        fields["choice"] = _from_json(fields["choice"], [fields["choice"]])
    constraints.check(limits, fields)
    # vLLM takes this string for an object without a check.
    if isinstance(fields.get("structural_tag"), str):
        _object(fields["structural_tag"], f"{schema.structured_name}.structural_tag")
    return _coerced(schema, schema.structured_name, fields, schema.structured)


def _from_json(value: Any, otherwise: Any) -> Any:
    """Return the value in a string, or ``otherwise`` if the string is not JSON."""
    # Clients may send the JSON itself in place of a string with JSON.
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return otherwise


def _object(value: Any, name: str) -> dict[str, Any]:
    """Return an object from itself or from a string with its JSON; ``name`` is for errors."""
    fields = _from_json(value, None)
    if not isinstance(fields, dict):
        raise InvalidRequestError(
            f"sampling parameter '{name}' must be an object such as " + '{"regex": "…"}'
        )
    return fields


def response_format(value: Any) -> dict[str, Any]:
    """Return the constraint for the OpenAI protocol's ``response_format``.

    Raises:
        InvalidRequestError: it is not one of that protocol.
    """
    fields = _object(value, "response_format")
    kind = fields.get("type")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        inner = fields.get("json_schema")
        schema = inner.get("schema", inner) if isinstance(inner, dict) else None
        if isinstance(schema, dict):
            return {"json": schema}
        raise InvalidRequestError("response_format.json_schema must hold an object 'schema'")
    if kind == "structural_tag":
        return {"structural_tag": json.dumps(fields)}
    raise InvalidRequestError(
        "response_format.type must be one of text, json_object, json_schema, structural_tag"
    )
