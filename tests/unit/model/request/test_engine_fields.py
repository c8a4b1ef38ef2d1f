"""Fields of a request for vLLM's caches, scheduler and other engines: bounded, and allowed by name."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support import fake_vllm
from support.fake_triton import Request
from support.gates import admitted as let_in
from support.gates import fit_of
from triton_vllm.base.errors import AdapterError
from triton_vllm.base.limits import USUAL, Limits
from triton_vllm.request.engine_fields import ENGINE_FIELDS
from triton_vllm.request.kinds import Served
from triton_vllm.request.parse import parse
from triton_vllm.vllm_api import Facts

TEXT = {"text_input": np.array([b"hi"], np.object_)}
ALL = Limits(allowed_request_fields=ENGINE_FIELDS)
NAMES = ("SamplingParams", "StructuredOutputsParams", "RequestOutputKind", "PoolingParams")


class Llm:
    """What `add_request` takes in a vLLM without sessions."""

    def add_request(self, request_id, prompt, params, data_parallel_rank=None):
        """Do nothing."""


def read(limits=ALL, **values) -> Any:
    return parse(TEXT, json.dumps(values), limits=limits)


def admitted(values, limits=ALL, facts=None, trace=None) -> Any:
    request = Request(TEXT, json.dumps(values))
    if trace is not None:
        request.trace = lambda: SimpleNamespace(get_context=lambda: trace)
    vllm: Any = SimpleNamespace(**{n: getattr(fake_vllm, n) for n in NAMES}, client_errors=(ValueError,), AsyncLLM=Llm)
    facts = replace(facts or Facts(), tasks=("generate",))
    job = let_in(request, Served("mine", vllm, fit_of(facts, limits), lambda _: None))
    return job, [r.error.message for r in request.sender.told()]


def test_a_salt_is_anybodys():
    """It keeps a request's prefixes from others, and takes nothing from them."""
    request = read(USUAL, cache_salt="a" * 256, max_tokens=3)
    assert (request.prompt.cache_salt, request.parameters) == ("a" * 256, {"max_tokens": 3})
    assert read(USUAL).prompt.cache_salt is None


@pytest.mark.parametrize("salt", ["", 1, ["a"], "a" * 257])
def test_a_salt_is_a_short_string(salt):
    """Empty, vLLM would take it for none."""
    with pytest.raises(AdapterError, match="'cache_salt' must be a string of 1 to 256 characters"):
        read(USUAL, cache_salt=salt)


@pytest.mark.parametrize("name", ENGINE_FIELDS)
def test_other_fields_are_the_operators_to_allow(name):
    """They reach other requests or machines."""
    with pytest.raises(AdapterError, match=f"'{name}' is not allowed: ALLOWED_REQUEST_FIELDS"):
        read(USUAL, **{name: {}})


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"extra_args": []}, "'extra_args' must be an object"),
        ({"kv_transfer_params": "["}, "kv_transfer_params is not valid JSON"),
        ({"kv_transfer_params": 1}, "'kv_transfer_params' must be an object"),
        ({"extra_args": {"a": [2**63]}}, "'extra_args' holds an integer of more than 64 bits"),
        ({"session_id": ""}, "'session_id' must be a string of 1 to 256"),
        ({"data_parallel_rank": -1}, "'data_parallel_rank' must be the number of an engine"),
        ({"data_parallel_rank": True}, "'data_parallel_rank' must be the number of an engine"),
    ],
)
def test_allowed_fields_have_their_types(values, says):
    """An error names the field."""
    with pytest.raises(AdapterError, match=says):
        read(**values)


def test_a_field_is_not_allowed_by_way_of_another():
    """vLLM takes the address of another machine from `extra_args`, too."""
    given = {"extra_args": {"kv_transfer_params": {"remote_host": "10.0.0.1"}}}
    with pytest.raises(
        AdapterError, match="'extra_args' must not have kv_transfer_params, which ALLOWED_REQUEST_FIELDS does not"
    ):
        read(Limits(allowed_request_fields=("extra_args",)), **given)
    assert read(**given).engine_fields == given


def test_fields_go_where_vllm_has_them():
    """Into SamplingParams, as vLLM's own server puts them there, or beside the request."""
    job, _ = admitted({"extra_args": {"a": 1}, "kv_transfer_params": '{"b": 2}', "data_parallel_rank": 1})
    assert job.order.params.extra_args == {"a": 1, "kv_transfer_params": {"b": 2}}
    assert job.order.options == {"data_parallel_rank": 1}
    plain, _ = admitted({})
    assert plain.order.options == {}
    assert not hasattr(plain.order.params, "extra_args")


def test_a_vllm_without_a_field_says_so():
    """It must not be left out without a word."""
    assert admitted({"session_id": "s"})[1] == ["sampling parameter 'session_id': this vLLM does not have it"]


TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("trace", "values", "headers"),
    [
        (json.dumps({"traceparent": TRACE, "baggage": "x"}), {}, {"traceparent": TRACE}),
        (json.dumps({"traceparent": TRACE}), {"traceparent": "other"}, {"traceparent": TRACE}),
        ("", {"traceparent": TRACE, "tracestate": "a=b"}, {"traceparent": TRACE, "tracestate": "a=b"}),
        ("", {"Traceparent": TRACE, "tracestate": "a" * 513}, {"traceparent": TRACE}),
        ("", {"traceparent": 1}, None),
        ("no JSON", {}, None),
        ("[]", {}, None),
    ],
)
def test_a_trace_goes_on_in_vllm(trace, values, headers):
    """The server's own, else that of forwarded headers; only where vLLM exports traces."""
    job, _ = admitted(values, facts=Facts(traces=True), trace=trace)
    assert job.order.options.get("trace_headers") == headers
    assert admitted(values, trace=trace)[0].order.options == {}
