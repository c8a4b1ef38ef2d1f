"""Bound the cost of a request, when the tokens of its prompt and vLLM's parameters are known.

This is the last check before vLLM gets a request, whichever API it came by.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from triton_vllm.base.limits import TOKEN_IDS, refuse_above
from triton_vllm.vllm_api.minimum import bound_minimum

if TYPE_CHECKING:
    from triton_vllm.base.limits import Limits
    from triton_vllm.engine.job import Job
    from triton_vllm.vllm_api import Facts


_SETS = ("allowed_token_ids", "stop_token_ids")
"""The parameters that vLLM takes for sets."""


_FEWER = "send fewer prompts in one request"


def bound(job: Job[Any], params: Any, prompt: Any, limits: Limits, facts: Facts) -> None:
    """Refuse a prompt that costs so much that other requests would wait; make others cheaper.

    Repetitions are removed from its lists of ids, vLLM keeps its log probabilities in flat lists,
    and its ``min_tokens`` fit the model.

    Args:
        job: the request. Changed in place: the costs of its prompts are added up.
        params: vLLM's SamplingParams or PoolingParams. Changed in place.
        prompt: as ``add_request`` takes it: a text, or a mapping with a text or with token ids.
        limits: the model's limits.
        facts: what the model can take.

    Raises:
        InvalidRequestError: the request costs more than a limit allows. The text has the limit.
    """
    # 1) This prompt alone
    _remove_repeated_ids(params)
    token_ids = _count_token_ids(params, limits)
    logprob_values = _count_logprob_values(params, prompt, limits, facts)
    # 2) All prompts of the request so far. vLLM's own server copies the lists for each prompt, and
    # builds one answer for all.
    job.token_ids += token_ids
    job.logprob_values += logprob_values
    refuse_above(
        limits.max_token_ids,
        job.token_ids,
        "the longest list of token ids, times n, has for all prompts",
        "token ids",
        _FEWER,
    )
    refuse_above(
        limits.max_logprob_values,
        job.logprob_values,
        "max_tokens times logprobs, plus the prompt's tokens times prompt_logprobs, times n, "
        "are for all prompts",
        "values",
        _FEWER,
    )
    # 3) vLLM's flat lists. There a log probability takes 35 bytes, and as an object 250. For a
    # prompt, they would turn the null of its first token into an empty object.
    if hasattr(params, "flat_logprobs") and params.prompt_logprobs is None:
        params.flat_logprobs = True
    if getattr(params, "min_tokens", 0):
        bound_minimum(params, prompt, facts.max_tokens)


def _remove_repeated_ids(params: Any) -> None:
    """Remove repetitions from the parameters that vLLM takes for sets."""
    # The order and number of the ids in other lists matter to vLLM.
    for name in _SETS:
        ids = getattr(params, name, None)
        if ids:
            setattr(params, name, list(dict.fromkeys(ids)))


def _count_token_ids(params: Any, limits: Limits) -> int:
    """Return the number of ids in the longest list of token ids, times ``n``.

    Raises:
        InvalidRequestError: a list times ``n`` has more ids than are allowed.
    """
    # vLLM sends each list to EngineCore once for each completion. 300,000 repetitions of one id
    # with 128 completions stopped the engine for seconds.
    completions = getattr(params, "n", 1)
    longest = 0
    for name in TOKEN_IDS:
        count = _count_ids(params, name) * completions
        what = f"sampling parameters: {name} times n has"
        refuse_above(limits.max_token_ids, count, what, "token ids")
        longest = max(longest, count)
    return longest


def _count_ids(params: Any, name: str) -> int:
    """Return the number of ids in a parameter; 0 if this vLLM or the request does not have it."""
    return len(getattr(params, name, None) or ())


def _count_logprob_values(params: Any, prompt: Any, limits: Limits, facts: Facts) -> int:
    """Return the most log probabilities that the prompt and its answers can have.

    Raises:
        InvalidRequestError: there may be more than are allowed.
    """
    # vLLM makes them in the event loop that serves all requests, and keeps them until the answer
    # ends. Each completion has its own, also of the prompt.
    length = facts.max_tokens
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
    # 1) The answer, which ends at the model's length, whatever the request asks for
    answer_tokens = getattr(params, "max_tokens", None)
    # A model's length of 0 is unknown.
    if length:
        # The tokens of a text are not known, and it may have few.
        left = length if ids is None else max(length - len(ids), 0)
        answer_tokens = min(answer_tokens or left, left)
    for_each_token = max(
        _logprobs_per_token(params, "logprobs", facts.vocabulary),
        _count_ids(params, "logprob_token_ids"),
    )
    of_answer = (answer_tokens or 0) * for_each_token
    # 2) The prompt
    prompt_tokens = _most_tokens(prompt, length) if ids is None else len(ids)
    of_prompt = prompt_tokens * _logprobs_per_token(params, "prompt_logprobs", facts.vocabulary)
    # Here the request names the ids for each of the prompt's tokens.
    id_lists = getattr(params, "prompt_logprob_token_ids", None)
    if id_lists is not None:
        of_prompt += sum(map(len, id_lists))
    # 3) All completions
    values = (of_answer + of_prompt) * getattr(params, "n", 1)
    refuse_above(
        limits.max_logprob_values,
        values,
        "sampling parameters: max_tokens times logprobs, "
        "plus the prompt's tokens times prompt_logprobs, times n, are",
        "values",
    )
    return values


def _logprobs_per_token(params: Any, name: str, vocabulary: int) -> int:
    """Return how many log probabilities ``logprobs`` or ``prompt_logprobs`` asks for per token."""
    asked: int = getattr(params, name, None) or 0
    # -1 means all tokens of the vocabulary.
    return vocabulary if asked < 0 else asked


def _most_tokens(prompt: Any, length: int) -> int:
    """Return the most tokens that a prompt without token ids can have.

    Before 0.20, vLLM tokenizes a prompt after it has been added.

    Args:
        prompt: a text, or a mapping with a text.
        length: the model's length in tokens. 0 means unknown.
    """
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    # Each byte of a text may be a token.
    most = len(text.encode()) if isinstance(text, str) else 0
    return min(most, length) if length else most
