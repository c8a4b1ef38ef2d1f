"""What a request may cost is bounded once its prompt's tokens are known, by whichever API it came."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from support.fake_reply import fake_reply
from triton_vllm.base.errors import InvalidRequestError
from triton_vllm.base.limits import TOKEN_IDS, USUAL, Limits
from triton_vllm.engine import cost
from triton_vllm.engine.job import Job
from triton_vllm.vllm_api import Facts

PROMPT = {"prompt_token_ids": [7] * 2000}


def bound_cost(params: Any, prompt: Any, limits: Limits, room: int, vocabulary: int = 0) -> None:
    cost.bound(Job(fake_reply()), params, prompt, limits, Facts(max_tokens=room, vocabulary=vocabulary))


def params(**given: Any) -> Any:
    return SimpleNamespace(**{"n": 1, "max_tokens": 16, "logprobs": None, "prompt_logprobs": None, **given})


@pytest.mark.parametrize(
    "given",
    [
        {"max_tokens": 1_000_000, "logprobs": 20},
        {"prompt_logprobs": 20},
        {"max_tokens": 1_000_000, "logprobs": 0},
    ],
)
def test_usual_requests_pass(given):
    """Without log probabilities a request costs nothing here, however long its answer."""
    bound_cost(params(**given), PROMPT, USUAL, 40_000)


@pytest.mark.parametrize(
    ("given", "values"),
    [
        ({"n": 128, "max_tokens": 1000, "logprobs": 20}, 2_560_000),
        ({"max_tokens": None, "logprobs": 30}, 38_000 * 30),
        ({"max_tokens": 30_000, "logprobs": 1, "logprob_token_ids": list(range(40))}, 1_200_000),
        ({"max_tokens": 100_000, "logprobs": 20, "prompt_logprobs": 150}, 38_000 * 20 + 2000 * 150),
        ({"n": 2, "prompt_logprob_token_ids": [list(range(600))] * 1000}, 1_200_000),
    ],
)
def test_log_probabilities_are_bounded_over_all_completions_and_the_prompt(given, values):
    """The refusal has the amount and the limit; a request without max_tokens may fill the model's length."""
    with pytest.raises(InvalidRequestError, match=rf"times n, are {values} values; this model takes at most 1048576"):
        bound_cost(params(**given), PROMPT, USUAL, 40_000)
    bound_cost(params(**given), PROMPT, Limits(max_logprob_values=0), 40_000)


@pytest.mark.parametrize("name", [name for name in TOKEN_IDS if name != "logit_bias"])
def test_no_id_of_a_set_reaches_the_engine_twice(name):
    """Other lists stay: vLLM emits one in its order, and counts another one."""
    asked = params(**{name: [5, 3, 5, 5, 3]})
    bound_cost(asked, PROMPT, USUAL, 40_000)
    assert getattr(asked, name) == ([5, 3] if name in ("allowed_token_ids", "stop_token_ids") else [5, 3, 5, 5, 3])


def test_ids_are_bounded_over_all_completions():
    """Each completion sends its own copy to the engine."""
    limits = Limits(max_token_ids=20)
    bound_cost(params(n=10, allowed_token_ids=[1, 2] * 50), PROMPT, limits, 0)
    with pytest.raises(InvalidRequestError, match="allowed_token_ids times n has 22 token ids; this model takes at most 20"):
        bound_cost(params(n=11, allowed_token_ids=[1, 2]), PROMPT, limits, 0)


def test_all_log_probabilities_are_those_of_the_vocabulary():
    """As vLLM counts -1, where an operator allows it."""
    limits = Limits(max_logprobs=0, max_logprob_values=2000 * 300 + 16 * 300 - 1)
    asked = params(logprobs=-1, prompt_logprobs=-1)
    with pytest.raises(InvalidRequestError, match=f"are {2016 * 300} values"):
        bound_cost(asked, PROMPT, limits, 40_000, vocabulary=300)
    bound_cost(asked, PROMPT, limits, 40_000, vocabulary=299)


def test_log_probabilities_are_kept_in_flat_lists_if_vllm_has_them():
    """Not those of a prompt: clients expect null for its first token."""
    answer, prompt, old = (
        params(logprobs=5, flat_logprobs=False),
        params(prompt_logprobs=5, flat_logprobs=False),
        params(logprobs=5),
    )
    for asked in (answer, prompt, old):
        bound_cost(asked, PROMPT, USUAL, 40_000)
    assert (answer.flat_logprobs, prompt.flat_logprobs, hasattr(old, "flat_logprobs")) == (True, False, False)


def test_a_text_leaves_the_whole_room_to_its_answer():
    """It may have fewer tokens than bytes."""
    with pytest.raises(InvalidRequestError, match="are 2560000 values"):
        bound_cost(params(n=128, max_tokens=1000, logprobs=20), "t" * 2000, USUAL, 2000)


@pytest.mark.parametrize(
    ("prompt", "room", "tokens"),
    [("text", 40_000, 4), ({"prompt": "\u20ac"}, 40_000, 3), ({"prompt": "text"}, 2, 2), ("text", 0, 4)],
)
def test_a_text_has_at_most_as_many_tokens_as_bytes(prompt, room, tokens):
    """Before 0.20, vLLM tokenizes it in ``add_request``; a longer one than the model takes is refused there."""
    limits = Limits(max_logprob_values=100 * tokens - 1)
    with pytest.raises(InvalidRequestError, match=f"are {100 * tokens} values"):
        bound_cost(params(prompt_logprobs=100), prompt, limits, room)
    bound_cost(params(prompt_logprobs=99), prompt, limits, room)


@pytest.mark.parametrize("prompt", [{}, {"prompt_embeds": object()}, object()])
def test_a_prompt_without_text_and_tokens_counts_as_empty(prompt):
    """So do pooling requests, which come without these parameters."""
    bound_cost(params(prompt_logprobs=100), prompt, USUAL, 0)
    bound_cost(SimpleNamespace(dimensions=3), "text", USUAL, 0)
