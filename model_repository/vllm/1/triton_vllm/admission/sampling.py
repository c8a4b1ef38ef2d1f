"""Turn the JSON sampling parameters of a request into vLLM's SamplingParams."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from triton_vllm.coerce import closest, coerce
from triton_vllm.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from triton_vllm.compat import Schema

# Set by the adapter or by vLLM itself, never by a client.
INTERNAL = frozenset({"output_kind", "skip_clone", "output_text_buffer_length", "extra_args", "stream_interval"})
# Names of the official backend, older vLLM and the OpenAI protocol for the same constraint.
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "guided_whitespace_pattern": "whitespace_pattern",
}


def build(schema: Schema, parameters: Mapping[str, Any], *, stream: bool) -> Any:
    """Return SamplingParams for a request: only new tokens when streaming, everything at the end when not.

    Raises:
        InvalidRequestError: unknown parameter, wrong type or a value that vLLM refuses.
    """
    values = _structured(schema, dict(parameters))
    made = {name: _checked(schema, name, value) for name, value in values.items()}
    made["output_kind"] = schema.streaming if stream else schema.whole
    try:
        return schema.make(**schema.fixed, **made)
    except schema.refusals as error:
        raise InvalidRequestError(f"sampling parameters: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]


def _checked(schema: Schema, name: str, value: Any) -> Any:
    if name not in schema.types or name in INTERNAL:
        known = [n for n in schema.types if n not in INTERNAL]
        raise InvalidRequestError(f"unknown sampling parameter '{name}'{closest(name, known)}")
    if name == schema.structured_name and isinstance(value, schema.structured):
        return value
    try:
        return coerce(value, schema.types[name])
    except ValueError as error:
        raise InvalidRequestError(f"sampling parameter '{name}' {error}") from None


def _structured(schema: Schema, values: dict[str, Any]) -> dict[str, Any]:
    """Replace every spelling of a structured-output constraint by the one that this vLLM takes."""
    constraint: dict[str, Any] = {}
    for old, new in GUIDED.items():
        if old in values:
            constraint[new] = values.pop(old)
    if "response_format" in values:
        constraint |= _response_format(values.pop("response_format"))
    for name in ("structured_outputs", "guided_decoding"):
        if name in values:
            constraint |= _object(values.pop(name), name)
    if not constraint:
        return values
    for name in ("backend", "_backend"):  # chosen for the whole engine since vLLM 0.11
        constraint.pop(name, None)
    values[schema.structured_name] = _constraint(schema, constraint)
    return values


def _constraint(schema: Schema, fields: dict[str, Any]) -> Any:
    if isinstance(fields.get("choice"), str):
        fields["choice"] = _json_or(fields["choice"], [fields["choice"]])
    try:
        return coerce(fields, schema.structured)
    except schema.refusals as error:
        raise InvalidRequestError(f"sampling parameter '{schema.structured_name}' {_first_line(error)}") from None


def _json_or(text: str, otherwise: Any) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return otherwise


def _object(value: Any, name: str) -> dict[str, Any]:
    found = _json_or(value, None) if isinstance(value, str) else value
    if not isinstance(found, dict):
        raise InvalidRequestError(f'sampling parameter \'{name}\' must be an object such as {{"regex": "…"}}')
    return dict(found)


def _response_format(value: Any) -> dict[str, Any]:
    """Return the constraint of the OpenAI protocol's `response_format`."""
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
    raise InvalidRequestError("response_format.type must be one of text, json_object, json_schema, structural_tag")
