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
    """Refuse a prompt that would stop the others, and make it cheaper.

    Repetitions are removed from its lists of ids, vLLM keeps its log probabilities in flat lists,
    and its ``min_tokens`` fit the model.

    Args:
        job: the request. Changed in place: the costs of its prompts are added up.
        params: vLLM's SamplingParams or PoolingParams. Changed in place.
        prompt: as ``add_request`` takes it. Each byte of a text may be a token.
        limits: the model's limits.
        facts: what the model can take.

    Raises:
        InvalidRequestError: the request costs more than a limit allows. The text has the limit.
    """
    ids, values = _costs(params, prompt, limits, facts)
    # vLLM's own server copies the lists for each prompt, and builds one answer for all.
    job.token_ids += ids
    job.logprob_values += values
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
    if getattr(params, "min_tokens", 0):
        bound_minimum(params, prompt, facts.max_tokens)


def _costs(params: Any, prompt: Any, limits: Limits, facts: Facts) -> tuple[int, int]:
    """Return the ids in the longest list of a prompt and its log probabilities, times n."""
    room = facts.max_tokens
    vocabulary = facts.vocabulary
    completions = getattr(params, "n", 1)
    # 1) Lists of ids. vLLM sends each to EngineCore once for each completion. 300,000 repetitions
    # of one id with 128 completions stopped the engine for seconds.
    sizes = {}
    for name in TOKEN_IDS:
        ids = getattr(params, name, None)
        if not ids:
            continue
        # The order and number of the other lists matter to vLLM.
        if name in _SETS:
            ids = list(dict.fromkeys(ids))
            setattr(params, name, ids)
        sizes[name] = len(ids)
        what = f"sampling parameters: {name} times n has"
        refuse_above(limits.max_token_ids, len(ids) * completions, what, "token ids")
    # 2) Log probabilities. vLLM makes them in the event loop that serves all requests, and keeps
    # them until the answer ends. Each completion has its own, also of the prompt.
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
    prompt_tokens = _most_tokens(prompt, room) if ids is None else len(ids)
    for_each = _for_each(params, "logprobs", vocabulary)
    for_each = max(for_each, sizes.get("logprob_token_ids", 0))
    # An answer ends at the model's length, whatever the request asks for.
    tokens = getattr(params, "max_tokens", None)
    if room:
        # A text may have fewer tokens, and leave more room.
        left = room if ids is None else max(room - len(ids), 0)
        tokens = min(tokens or left, left)
    of_prompt = prompt_tokens * _for_each(params, "prompt_logprobs", vocabulary)
    rows = getattr(params, "prompt_logprob_token_ids", None)
    if rows is not None:
        of_prompt += sum(map(len, rows))
    values = ((tokens or 0) * for_each + of_prompt) * completions
    refuse_above(
        limits.max_logprob_values,
        values,
        "sampling parameters: max_tokens times logprobs, "
        "plus the prompt's tokens times prompt_logprobs, times n, are",
        "values",
    )
    # 3) vLLM's flat lists. There a value takes 35 bytes, and as an object 250. For a prompt, they
    # would turn the null of its first token into an empty object.
    if hasattr(params, "flat_logprobs") and params.prompt_logprobs is None:
        params.flat_logprobs = True
    return max(sizes.values(), default=0) * completions, values


def _for_each(params: Any, name: str, vocabulary: int) -> int:
    """Return the log probabilities for each token."""
    asked: int = getattr(params, name, None) or 0
    # -1 means all tokens of the vocabulary.
    return vocabulary if asked < 0 else asked


def _most_tokens(prompt: Any, room: int) -> int:
    """Return the most tokens of a prompt that vLLM tokenizes later, as it does before 0.20."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    most = len(text.encode()) if isinstance(text, str) else 0
    return min(most, room) if room else most
