"""Pooling requests: typed parameters in, JSON numbers out."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from triton_vllm.base.errors import InternalError, InvalidRequestError
from triton_vllm.base.wants import Wants
from triton_vllm.pooling.gathering import Gathered
from triton_vllm.pooling.request import build
from triton_vllm.reply.response import PoolingAssembler


@dataclasses.dataclass
class Params:
    """Stands where vLLM's PoolingParams does."""

    task: str
    dimensions: int | None = None


TYPES = {"task": str, "dimensions": int | None}


VLLM: Any = SimpleNamespace(PoolingParams=Params, client_errors=(ValueError,))


def test_parameters_are_typed():
    """A number may come as a string."""
    assert build(VLLM, TYPES, "embed", {"dimensions": "4"}) == Params("embed", 4)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"dimension": 4}, "unknown pooling parameter 'dimension', did you mean 'dimensions'?"),
        ({"dimensions": True}, "pooling parameter 'dimensions' must be an integer"),
    ],
)
def test_wrong_parameters_are_refused_by_name(given, says):
    """Unknown and ill-typed ones alike."""
    with pytest.raises(InvalidRequestError) as caught:
        build(VLLM, TYPES, "embed", given)
    assert says in str(caught.value)


def test_response_is_json_with_counts():
    """The official shape: the vector as JSON in text_output, no output tokens."""
    output = pooled([0.5, -1.0], tokens=3)
    made = dict(PoolingAssembler(Wants(num_input_tokens=True, num_output_tokens=True)).build([output]))
    assert json.loads(made["text_output"][0]) == [0.5, -1.0]
    assert made["num_input_tokens"].tolist() == [3]
    assert made["num_output_tokens"].tolist() == [0]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_overflow_is_an_error(value):
    """A model that overflows its dtype; NaN in the answer is no JSON."""
    output = pooled([[0.5, value]])
    with pytest.raises(InternalError, match="numbers that are not finite"):
        PoolingAssembler(Wants()).build([output])


def pooled(*values, tokens=2):
    """Return the outputs of a request's parts."""
    parts: Any = [SimpleNamespace(outputs=SimpleNamespace(data=np.array(v)), prompt_token_ids=[1] * tokens) for v in values]
    return Gathered(parts)


def test_several_inputs_have_an_element_each_and_one_count():
    """In the order of the inputs."""
    made = dict(PoolingAssembler(Wants(num_input_tokens=True)).build([pooled([0.5, 1.0], [2.0])]))
    assert [json.loads(text) for text in made["text_output"]] == [[0.5, 1.0], [2.0]]
    assert made["num_input_tokens"].tolist() == [4]


class Table:
    """Rows of numbers, of which none is asked for before its turn."""

    ndim = 2

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(np.array(self.rows))

    def tolist(self):
        raise AssertionError("all at once")


def test_a_vector_for_each_token_is_written_row_by_row():
    """What is written in one call keeps Python's lock, and with it all other requests, for its whole time."""
    part: Any = SimpleNamespace(outputs=SimpleNamespace(data=Table([[0.5, 1.0], [2.0, -3.25]])), prompt_token_ids=[1])
    made = dict(PoolingAssembler(Wants()).build([Gathered([part])]))
    assert made["text_output"].tolist() == [b"[[0.5, 1.0], [2.0, -3.25]]"]
