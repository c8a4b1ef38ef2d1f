"""No answer is asked to be longer than the model can make it; vLLM 0.28 would never end it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from triton_vllm.vllm_api.minimum import bound_minimum


@pytest.mark.parametrize(
    ("minimum", "most", "expected"),
    [(2**62, 256, 253), (254, 256, 253), (253, 256, 253), (0, 256, 0), (9, 2, 0), (300, 0, 300)],
)
def test_the_minimum_is_within_what_the_prompt_leaves(minimum, most, expected):
    """A smaller one stays, and so does any where the model's length is not known."""
    params = SimpleNamespace(min_tokens=minimum)
    bound_minimum(params, {"prompt_token_ids": [1, 2, 3]}, most)
    assert params.min_tokens == expected
