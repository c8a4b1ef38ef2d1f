"""Whatever arrives, the parser returns a request or refuses it in a short sentence; nothing else escapes."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from support import fake_vllm
from support.fuzz import SAMPLING
from triton_vllm import vllm_api
from triton_vllm.base.errors import LONGEST_TEXT, AdapterError
from triton_vllm.request.contract import INPUTS
from triton_vllm.request.kinds import Request
from triton_vllm.request.parse import parse
from triton_vllm.request.sampling import build

# The bound is on the number of examples, not on their time, and each run has the same ones.
SETTINGS = settings(max_examples=150, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
NUMBERS = st.integers() | st.floats() | st.sampled_from((2**31, 2**63, -(2**63) - 1, 10**400))
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.sampled_from(SAMPLING), inner, max_size=4)
    ),
    max_leaves=12,
)
DOCUMENTS = JSON.map(json.dumps) | st.text(max_size=40)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": JSON}, optional={"content": JSON | st.lists(st.fixed_dictionaries({"type": JSON, "image_url": JSON}))}
    )
).map(json.dumps)
EMBEDDINGS = st.fixed_dictionaries({"input": JSON}, optional={"pooling_params": JSON, "lora_name": JSON}).map(json.dumps)


def strings(of: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    """Tensors of strings, as Triton's stub hands them over; some are no UTF-8."""
    texts = of.map(lambda text: text.encode("utf-8", "surrogatepass")) | st.binary(max_size=20)
    return st.lists(texts, max_size=3).map(lambda items: np.array([*items, None], dtype=object)[:-1])


TENSORS = {
    "TYPE_BOOL": st.lists(st.booleans(), max_size=2).map(lambda items: np.array(items, np.bool_)),
    "TYPE_INT64": st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4).map(lambda items: np.array(items, np.int64)),
    "TYPE_STRING": strings(DOCUMENTS),
}
OWN = {"messages": strings(MESSAGES | DOCUMENTS), "embedding_request": strings(EMBEDDINGS | DOCUMENTS)}
REQUESTS = st.fixed_dictionaries({}, optional={t.name: OWN.get(t.name, TENSORS[t.data_type]) for t in INPUTS})


def outcome(make: Callable[[], Any]) -> Any:
    """Return what is made, or the text of the refusal."""
    try:
        return make()
    except AdapterError as error:
        return str(error)


@pytest.mark.long
@SETTINGS
@given(REQUESTS, DOCUMENTS | st.just(""), st.integers(0, 2**63))
@example({"text_input": np.array([b"a"], object), "sampling_parameters": np.array([b'{"n": 1e999}'], object)}, "", 0)
def test_a_request_or_a_short_refusal(inputs, parameters, timeout):
    """No other exception, for that would be told as a fault of the server and fill its log."""
    found = outcome(lambda: parse(inputs, parameters, timeout))
    assert isinstance(found, Request) or 0 < len(found) <= LONGEST_TEXT


NAMES = ("SamplingParams", "StructuredOutputsParams", "RequestOutputKind", "PoolingParams")
VLLM: Any = SimpleNamespace(**{name: getattr(fake_vllm, name) for name in NAMES}, client_errors=(ValueError, TypeError))
FIELDS = fake_vllm.SamplingParams.__struct_fields__


@SETTINGS
@given(st.dictionaries(st.sampled_from((*FIELDS, *SAMPLING)), JSON, max_size=4))
@example({"structured_outputs": {"json": {"maximum": 2**70}}})
@example({"guided_regex": 5})
@example({"stop": [None]})
def test_parameters_or_a_short_refusal(values):
    """The same for what the parser has let through."""
    schema = vllm_api.sampling_schema(VLLM)
    found = outcome(lambda: build(schema, values, stream=False))
    assert isinstance(found, fake_vllm.SamplingParams) or 0 < len(found) <= LONGEST_TEXT
