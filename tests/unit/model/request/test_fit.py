"""Which of vLLM's parameters would harm other requests; tests/hostile has the rest."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from triton_vllm.base.errors import InvalidRequestError
from triton_vllm.request.fit import check_params
from triton_vllm.vllm_api import Facts


@pytest.mark.parametrize(
    ("size", "count", "is_taken"), [(64, 8, True), (20, 3, True), (0, 0, True), (65, 8, False), (10**9, 2, False)]
)
def test_patterns_that_vllm_looks_for_are_bounded(size, count, is_taken):
    """It looks for all of them after each token."""
    params = SimpleNamespace(repetition_detection=SimpleNamespace(max_pattern_size=size, min_count=count))
    if is_taken:
        check_params(params, Facts())
        return
    with pytest.raises(InvalidRequestError, match=f"repetition_detection: max_pattern_size {size} squared, times min_count"):
        check_params(params, Facts())
