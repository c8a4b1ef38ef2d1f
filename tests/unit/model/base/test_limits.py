"""A request is measured before it is decoded: each input by its bytes, each list by its count, all by their sum."""

from __future__ import annotations

import numpy as np
import pytest

from triton_vllm.base.errors import InvalidRequestError
from triton_vllm.base.limits import Limits, check_sizes


def texts(*values):
    return np.array([value.encode() for value in values], dtype=object)


SMALL = Limits(max_request_bytes=20, max_text_bytes=8, max_parameter_bytes=6, max_images=2, max_clips=1)


@pytest.mark.parametrize(
    ("inputs", "parameters", "says"),
    [
        ({"text_input": texts("x" * 9)}, "", "text_input has 9 bytes; this model takes at most 8"),
        ({"embedding_request": texts("x" * 9)}, "", "embedding_request has 9 bytes"),
        ({"prompt_token_ids": np.zeros(3, np.int32)}, "", "prompt_token_ids has 12 bytes"),
        ({"sampling_parameters": texts("x" * 7)}, "", "sampling_parameters has 7 bytes"),
        ({"tools": texts("x" * 7)}, "", "tools has 7 bytes"),
        ({"tool_choice": texts("x" * 7)}, "", "tool_choice has 7 bytes"),
        ({"operator_request": texts("x" * 7)}, "", "operator_request has 7 bytes"),
        ({"chat_template_kwargs": texts("x" * 7)}, "", "chat_template_kwargs has 7 bytes"),
        ({}, "x" * 7, "the request parameters have 7 bytes"),
        ({"image": texts("", "", "")}, "", "image has 3 elements"),
        ({"audio": texts("", "")}, "", "audio has 2 elements"),
        ({"video": texts("", "")}, "", "video has 2 elements"),
        ({"image": texts("x" * 9, "y" * 8), "stream": np.array([True])}, "{} ", "the request has 21 bytes"),
    ],
)
def test_what_is_too_large_is_refused_by_name(inputs, parameters, says):
    """The text has the input, its size and the limit."""
    with pytest.raises(InvalidRequestError) as caught:
        check_sizes(SMALL, inputs, parameters)
    assert says in str(caught.value)


def test_what_is_as_large_as_the_limit_is_taken():
    """Limits are the most that is taken, for each input and for all."""
    check_sizes(SMALL, {"text_input": texts("x" * 8), "sampling_parameters": texts("y" * 6), "image": texts("z", "")}, "{}   ")
