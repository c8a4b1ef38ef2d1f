"""Convert the JSON sampling parameters of a request to vLLM's SamplingParams."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from triton_vllm.base.coerce import closest, coerce, shown
from triton_vllm.base.document import check_integers
from triton_vllm.base.errors import InvalidRequestError
from triton_vllm.base.limits import USUAL, refuse_above
from triton_vllm.constraints import checks as constraints

if TYPE_CHECKING:
    from collections.abc import Mapping

    from triton_vllm.base.limits import Limits
    from triton_vllm.vllm_api import ChatDefaults, Schema

# Only the adapter or vLLM itself sets these, never a client.
INTERNAL = frozenset({"output_kind", "skip_clone", "output_text_buffer_length", "extra_args"})
USUAL_TOKENS = 16
"""vLLM's ``max_tokens`` for a request that has none."""
LONGEST_STOP_STRING = 1024
_COUNTED = re.compile(r"\d+ validation errors? for \w+\n")
"""Matches the first line of pydantic's errors, which only counts them; the reasons follow."""
# The names of the official backend, of older vLLM and of the OpenAI protocol for the same constraint.
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "guided_whitespace_pattern": "whitespace_pattern",
}

UNASKED = ("backend", "_backend", "backend_was_auto", "_backend_was_auto")
"""Fields of a constraint that hold for the whole engine since vLLM 0.11, so a request cannot set them."""


def build(
    schema: Schema,
    parameters: Mapping[str, Any],
    *,
    stream: bool,
    limits: Limits = USUAL,
    chat: ChatDefaults | None = None,
) -> Any:
    """Return SamplingParams for a request. A stream gets only new tokens; a whole answer comes at the end.

    Args:
        schema: this vLLM's parameters.
        parameters: the request's parameters.
        stream: whether the answer is streamed.
        limits: the model's limits.
        chat: the defaults for a conversation. None for a text or tokens.

    Raises:
        InvalidRequestError: a parameter is unknown, too large or of the wrong type, or vLLM refuses
            its value.
    """
    values = _structured(schema, dict(parameters), limits)
    newer = values.pop("max_completion_tokens", None) if chat is not None else None
    if (
        newer is not None
    ):  # the OpenAI protocol's newer name; it takes precedence if a request has both
        values["max_tokens"] = _coerced(
            schema, "max_completion_tokens", newer, schema.types["max_tokens"]
        )
    made = {name: _checked(schema, name, value) for name, value in values.items()}
    if chat is not None:
        # The request's values take precedence over the model's defaults.
        made = {"max_tokens": None, **chat.values, **made}
        if chat.most is not None:
            asked = made["max_tokens"]
            made["max_tokens"] = chat.most if asked is None else min(chat.most, asked)
    _check_amounts(limits, made, chat.room if chat else USUAL_TOKENS)
    made["output_kind"] = schema.streaming if stream else schema.whole
    try:
        return schema.make(**schema.fixed, **made)
    except schema.refusals as error:
        raise InvalidRequestError(f"sampling parameters: {_reason(error)}") from None


def _check_amounts(limits: Limits, made: Mapping[str, Any], usual: int) -> None:
    n = made.get("n", 1)
    if n > 1:
        refuse_above(limits.max_n, n, "sampling parameters: n must be smaller, it is")
        tokens = n * (made.get("max_tokens") or usual)
        refuse_above(
            limits.max_answer_tokens,
            tokens,
            "sampling parameters: n times max_tokens are",
            "tokens",
        )
    for name in ("logprobs", "prompt_logprobs"):
        count = made.get(name) or 0
        # -1 asks vLLM for all tokens of the vocabulary.
        if count == -1 and limits.max_logprobs:
            raise InvalidRequestError(
                f"sampling parameters: {name} must be at most {limits.max_logprobs}, not -1 for all"
            )
        refuse_above(
            limits.max_logprobs, count, f"sampling parameters: {name} must be smaller, it is"
        )
    gathered = made.get("stream_interval") or 0
    refuse_above(
        limits.max_stream_interval,
        gathered,
        "sampling parameters: stream_interval must be smaller, it is",
    )
    for name in ("stop", "bad_words"):
        given = made.get(name) or ()
        words = [given] if isinstance(given, str) else given
        refuse_above(
            limits.max_stop_strings, len(words), f"sampling parameter '{name}' has", "strings"
        )
        longest = max(map(len, words), default=0)
        refuse_above(
            LONGEST_STOP_STRING,
            longest,
            f"sampling parameter '{name}' has a string of",
            "characters",
        )


def _reason(error: Exception) -> str:
    """Return the message of vLLM's exception, on one line."""
    text, counted = _COUNTED.subn("", str(error).strip())
    return " ".join(text.partition(" [type=")[0].split()) if counted else text.partition("\n")[0]


def _checked(schema: Schema, name: str, value: Any) -> Any:
    if name not in schema.types or name in INTERNAL:
        known = [n for n in schema.types if n not in INTERNAL]
        raise InvalidRequestError(
            f"unknown sampling parameter '{shown(name)}'{closest(name, known)}"
        )
    if name == schema.structured_name and isinstance(value, schema.structured):
        return value
    if isinstance(value, dict):
        check_integers(value, f"sampling parameter '{name}'")
    return _coerced(schema, name, value, schema.types[name])


def _coerced(schema: Schema, name: str, value: Any, hint: Any) -> Any:
    try:
        return coerce(value, hint)
    except ValueError as error:
        reason = _reason(error)
    except schema.refusals as error:  # vLLM's own exceptions are not ValueErrors
        reason = f"is refused by vLLM: {_reason(error)}"
    raise InvalidRequestError(f"sampling parameter '{name}' {reason}")


def _structured(schema: Schema, values: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """Replace each spelling of a structured-output constraint by the one that this vLLM takes."""
    constraint: dict[str, Any] = {}
    for old, new in GUIDED.items():
        if old in values:
            constraint[new] = values.pop(old)
    if "response_format" in values:
        constraint |= _response_format(values.pop("response_format"))
    for name in ("structured_outputs", "guided_decoding"):
        if name in values:
            constraint |= _object(values.pop(name), name)
    for name in UNASKED:
        constraint.pop(name, None)
    if not constraint.get(
        "disable_fallback"
    ):  # Triton's OpenAI frontend sends every field of its own vLLM's class, and newer vLLM does not have this one
        constraint.pop("disable_fallback", None)
    if constraint.get("json_object") in (
        False,
        "false",
    ):  # vLLM would count it as a constraint, and then find none
        del constraint["json_object"]
    if not constraint:
        return values
    values[schema.structured_name] = _constraint(schema, constraint, limits)
    return values


def _constraint(schema: Schema, fields: dict[str, Any], limits: Limits) -> Any:
    if isinstance(fields.get("choice"), str):
        fields["choice"] = _json_or(fields["choice"], [fields["choice"]])
    constraints.check(limits, fields)
    if isinstance(fields.get("structural_tag"), str):  # vLLM takes it for an object without a check
        _object(fields["structural_tag"], f"{schema.structured_name}.structural_tag")
    schema_of_json = fields.get("json")
    read = _json_or(schema_of_json, None) if isinstance(schema_of_json, str) else schema_of_json
    check_integers(read, f"sampling parameter '{schema.structured_name}'")
    return _coerced(schema, schema.structured_name, fields, schema.structured)


def _json_or(text: str, otherwise: Any) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return otherwise


def _object(value: Any, name: str) -> dict[str, Any]:
    found = _json_or(value, None) if isinstance(value, str) else value
    if not isinstance(found, dict):
        raise InvalidRequestError(
            f'sampling parameter \'{name}\' must be an object such as {{"regex": "…"}}'
        )
    return dict(found)


def _response_format(value: Any) -> dict[str, Any]:
    """Return the constraint for the OpenAI protocol's ``response_format``."""
    found = _object(value, "response_format")
    kind = found.get("type")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        inner = found.get("json_schema")
        schema = inner.get("schema", inner) if isinstance(inner, dict) else None
        if isinstance(schema, dict):
            return {"json": schema}
        raise InvalidRequestError("response_format.json_schema must hold an object 'schema'")
    if kind == "structural_tag":
        return {"structural_tag": json.dumps(found)}
    raise InvalidRequestError(
        "response_format.type must be one of text, json_object, json_schema, structural_tag"
    )
