"""Sampling parameters reach vLLM with the right types, and structured outputs in every spelling."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from triton_vllm.base.errors import InvalidRequestError
from triton_vllm.base.limits import Limits
from triton_vllm.request.sampling import build
from triton_vllm.vllm_api import ChatDefaults, Schema


@dataclasses.dataclass
class Structured:
    """Stands where vLLM's StructuredOutputsParams does."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None


class VllmRefusalError(Exception):
    """Stands where VLLMValidationError does, which is no ValueError."""


PYDANTIC = "1 validation error for Pattern\nsize\n  Input should be a valid integer [type=int_type, input_value=None]\n    For"


@dataclasses.dataclass
class Pattern:
    """Stands where vLLM's RepetitionDetectionParams does: pydantic and its own checks."""

    size: int = 0

    def __post_init__(self):
        if not isinstance(self.size, int):
            raise ValueError(PYDANTIC)  # noqa: TRY004 - as pydantic's is
        if self.size < 0:
            raise VllmRefusalError("size must be >=0")


@dataclasses.dataclass
class Params:
    """Stands where vLLM's SamplingParams does, with its way to refuse a value."""

    n: int = 1
    temperature: float = 1.0
    max_tokens: int | None = 16
    stop: str | list[str] | None = None
    logit_bias: dict[int, float] | None = None
    structured_outputs: Structured | None = None
    pattern: Pattern | None = None
    stream_interval: int | None = None
    output_kind: str = ""
    skip_clone: bool = False

    def __post_init__(self):
        if self.n < 1:
            raise ValueError("n must be at least 1\ndetails")


TYPES = {
    "n": int,
    "temperature": float,
    "max_tokens": int | None,
    "stop": str | list[str] | None,
    "logit_bias": dict[int, float] | None,
    "structured_outputs": Structured | None,
    "pattern": Pattern | None,
    "output_kind": str,
    "skip_clone": bool,
    "stream_interval": int | None,
}
SCHEMA = Schema(
    types=TYPES,
    make=Params,
    structured=Structured,
    structured_name="structured_outputs",
    streaming="delta",
    whole="final",
    fixed={"skip_clone": True},
    refusals=(ValueError, TypeError, VllmRefusalError),
)


def test_kind_of_output_follows_the_stream_flag():
    """Only new tokens when streaming, everything once when not; clients cannot choose otherwise."""
    assert build(SCHEMA, {}, stream=True).output_kind == "delta"
    assert build(SCHEMA, {}, stream=False).output_kind == "final"
    with pytest.raises(InvalidRequestError, match="unknown sampling parameter 'output_kind'"):
        build(SCHEMA, {"output_kind": "final"}, stream=True)


def test_values_are_typed():
    """Numbers may come as strings, dictionary keys become token ids."""
    made = build(SCHEMA, {"max_tokens": "100", "temperature": "0", "logit_bias": {"5": 1}}, stream=False)
    assert (made.max_tokens, made.temperature, made.logit_bias) == (100, 0.0, {5: 1.0})
    assert made.skip_clone is True


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"n": 0}, "sampling parameters: n must be at least 1"),
        ({"temprature": 1}, "unknown sampling parameter 'temprature', did you mean 'temperature'?"),
        ({"guided_decoding": 3}, "'guided_decoding' must be an object"),
        ({"response_format": {"type": "xml"}}, "response_format.type must be one of"),
        ({"response_format": {"type": "json_schema"}}, "must hold an object 'schema'"),
        ({"structured_outputs": {"structural_tag": "null"}}, "'structured_outputs.structural_tag' must be an object"),
        ({"pattern": {"size": -1}}, "sampling parameter 'pattern' is refused by vLLM: size must be >=0"),
        ({"pattern": {"size": "x"}}, "sampling parameter 'pattern' is refused by vLLM: size Input should be a valid integer"),
        ({"pattern": {"size": 2**63}}, "sampling parameter 'pattern' holds an integer of more than 64 bits"),
        ({"guided_json": {"anyOf": [{"maximum": 2**63}]}}, "structured_outputs.json holds an integer of more than 64 bits"),
        ({"guided_json": '{"maximum": 9223372036854775808}'}, "structured_outputs.json holds an integer of more than 64 bits"),
    ],
)
def test_wrong_values_are_refused_by_name(given, says):
    """The text names the parameter and the reason, on one line."""
    with pytest.raises(InvalidRequestError) as caught:
        build(SCHEMA, given, stream=False)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "[type=" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"guided_regex": "a" * 9}, "structured_outputs.regex has 9 characters; this model takes at most 8"),
        ({"x" * 1_000_000: 1}, f"unknown sampling parameter '{'x' * 57}...'"),
        ({"n": "x" * 1_000_000}, 'must be an integer, not "xxx'),
    ],
)
def test_amounts_are_limited(given, says):
    """By the operator's limits, in few words."""
    limits = Limits(max_constraint_bytes=8)
    with pytest.raises(InvalidRequestError) as caught:
        build(SCHEMA, given, stream=False, limits=limits)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"structured_outputs": {"json_object": False}}, None),
        ({"structured_outputs": {"regex": "a+", "_backend": None, "_backend_was_auto": False}}, Structured(regex="a+")),
        ({"guided_decoding": {"regex": "a+", "backend_was_auto": False, "disable_fallback": False}}, Structured(regex="a+")),
        ({"structured_outputs": '{"regex": "a+"}'}, Structured(regex="a+")),
        ({"guided_decoding": {"choice": ["a", "b"], "backend": "xgrammar"}}, Structured(choice=["a", "b"])),
        ({"guided_decoding": '{"json": {"type": "object"}}'}, Structured(json={"type": "object"})),
        ({"guided_regex": "a+"}, Structured(regex="a+")),
        ({"guided_choice": '["a", "b"]'}, Structured(choice=["a", "b"])),
        ({"response_format": {"type": "json_object"}}, Structured(json_object=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}},
            Structured(json={"type": "object"}),
        ),
    ],
)
def test_structured_outputs_in_every_spelling(given, expected):
    """vLLM's name, its older ones, the official backend's JSON string and the OpenAI protocol's all arrive."""
    assert build(SCHEMA, given, stream=False).structured_outputs == expected


@pytest.mark.parametrize(
    ("given", "defaults", "expected"),
    [
        ({}, ChatDefaults(), None),
        ({}, ChatDefaults({"max_tokens": 7}), 7),
        ({"max_tokens": 9}, ChatDefaults({"max_tokens": 7}), 9),
        ({"max_tokens": 9}, ChatDefaults({}, 8), 8),
        ({}, ChatDefaults({}, 8), 8),
        ({"max_tokens": 0}, ChatDefaults({}, 8), 0),  # which vLLM refuses
        ({"max_completion_tokens": 5}, ChatDefaults({"max_tokens": 7}), 5),
        ({"max_completion_tokens": "5", "max_tokens": 6}, ChatDefaults(), 5),
    ],
)
def test_a_chat_may_answer_for_as_long_as_there_is_room(given, defaults, expected):
    """As by vLLM's own server: the request's length, the model's, or None, which is all; within the operator's most."""
    assert build(SCHEMA, given, stream=False, chat=defaults).max_tokens == expected


def test_a_chat_has_the_models_defaults():
    """What the request says goes before; a text has vLLM's."""
    defaults = ChatDefaults({"temperature": 0.25})
    assert build(SCHEMA, {}, stream=False, chat=defaults).temperature == 0.25
    assert build(SCHEMA, {"temperature": 0.5}, stream=False, chat=defaults).temperature == 0.5
    assert build(SCHEMA, {}, stream=False).temperature != 0.25
