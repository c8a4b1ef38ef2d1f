"""Which of vLLM's parameters would harm other requests; tests/hostile has the rest."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from support.gates import fit_of
from triton_vllm.base.errors import InvalidRequestError
from triton_vllm.base.limits import Limits
from triton_vllm.vllm_api import Facts


@pytest.mark.parametrize(
    ("size", "count", "is_taken"), [(64, 8, True), (20, 3, True), (0, 0, True), (65, 8, False), (10**9, 2, False)]
)
def test_patterns_that_vllm_looks_for_are_bounded(size, count, is_taken):
    """It looks for all of them after each token."""
    params = SimpleNamespace(repetition_detection=SimpleNamespace(max_pattern_size=size, min_count=count))
    if is_taken:
        fit_of(Facts()).check_params(params)
        return
    with pytest.raises(InvalidRequestError, match=f"repetition_detection: max_pattern_size {size} squared, times min_count"):
        fit_of(Facts()).check_params(params)


def test_strings_are_bounded_one_by_one():
    """vLLM compares each with the answer, token by token; a single one may come alone."""
    for given in ({"stop": "x" * 1025}, {"bad_words": ["a", "x" * 1025]}):
        with pytest.raises(InvalidRequestError, match=r"has a string of 1025 characters; this model takes at most 1024"):
            fit_of(Facts()).check_params(SimpleNamespace(**given))


@pytest.mark.parametrize(("max_tokens", "tokens"), [(6, 24), (None, 40)])
def test_several_completions_have_a_limit_together(max_tokens, tokens):
    """Without a number of tokens, each may fill the model's length; one answer is bounded by the model only."""
    fit = fit_of(Facts(max_tokens=10), Limits(max_answer_tokens=20))
    with pytest.raises(InvalidRequestError, match=f"n times max_tokens are {tokens} tokens; this model takes at most 20"):
        fit.check_params(SimpleNamespace(n=4, max_tokens=max_tokens))
    fit.check_params(SimpleNamespace(n=1, max_tokens=10**6))


@pytest.mark.parametrize(
    ("seats", "max_n", "most"),
    [(16, None, 8), (17, None, 8), (1, None, 1), (2, None, 1), (16, 12, 12), (0, 12, 12)],
)
def test_one_request_takes_half_of_the_seats_unless_the_operator_allows_more(seats, max_n, most):
    """The refusal says which parameter raises the bound."""
    fit = fit_of(Facts(max_tokens=10, seats=seats), Limits(max_n=max_n))
    fit.check_params(SimpleNamespace(n=most, max_tokens=1))
    told = f"n must be smaller, it is {most + 1}; this model takes at most {most}: MAX_N in the model's config.pbtxt raises that"
    with pytest.raises(InvalidRequestError, match=told):
        fit.check_params(SimpleNamespace(n=most + 1, max_tokens=1))


@pytest.mark.parametrize(
    ("seats", "max_n", "share"), [(16, None, 8), (1, None, 1), (16, 12, 12), (16, 4, 8), (16, 0, 0), (0, None, 0)]
)
def test_the_prompts_of_a_list_share_as_many_seats(seats, max_n, share):
    """An operator who allows fewer completions does not make lists slower."""
    assert fit_of(Facts(seats=seats), Limits(max_n=max_n)).share() == share


@pytest.mark.parametrize(("seats", "max_n"), [(0, None), (16, 0)])
def test_completions_have_no_bound_of_their_own_if_seats_are_unknown_or_the_operator_says_so(seats, max_n):
    """Their tokens together still have one."""
    fit = fit_of(Facts(max_tokens=10, seats=seats), Limits(max_n=max_n))
    fit.check_params(SimpleNamespace(n=1000, max_tokens=1))
    with pytest.raises(InvalidRequestError, match="n times max_tokens"):
        fit.check_params(SimpleNamespace(n=1000, max_tokens=1000))
