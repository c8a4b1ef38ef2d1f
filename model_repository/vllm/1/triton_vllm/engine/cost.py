"""Bound the cost of a request, when the tokens of its prompt and vLLM's parameters are known.

This is the last check before vLLM gets a request, whichever API it came through.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from triton_vllm.base.limits import TOKEN_IDS, refuse_above

if TYPE_CHECKING:
    from triton_vllm.base.limits import Limits


_SETS = ("allowed_token_ids", "stop_token_ids")
"""The parameters that vLLM takes for sets."""


def bound_cost(params: Any, prompt: Any, limits: Limits, room: int) -> None:
    """Refuse a request that would stop the others, and remove repetitions from its lists of ids.

    Args:
        params: vLLM's SamplingParams or PoolingParams. Changed in place.
        prompt: as ``add_request`` takes it. Each byte of a text may be a token.
        limits: the model's limits.
        room: tokens of a prompt and its answer together. 0 means unknown.

    Raises:
        InvalidRequestError: the request costs more than a limit allows. The text has the limit.
    """
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
    # 2) Log probabilities. vLLM makes an object of about 200 bytes for each, in the event loop that
    # serves all requests. Each completion has its own, also of the prompt.
    prompt_tokens = _tokens(prompt, room)
    for_each = max(getattr(params, "logprobs", None) or 0, sizes.get("logprob_token_ids", 0))
    # An answer ends at the model's length, whatever the request asks for.
    tokens = getattr(params, "max_tokens", None)
    if room:
        left = max(room - prompt_tokens, 0)
        tokens = min(tokens or left, left)
    of_prompt = prompt_tokens * (getattr(params, "prompt_logprobs", None) or 0)
    rows = getattr(params, "prompt_logprob_token_ids", None)
    if rows is not None:
        of_prompt += sum(map(len, rows))
    refuse_above(
        limits.max_logprob_values,
        ((tokens or 0) * for_each + of_prompt) * completions,
        "sampling parameters: max_tokens times logprobs, "
        "plus the prompt's tokens times prompt_logprobs, times n, are",
        "values",
    )


def _tokens(prompt: Any, room: int) -> int:
    """Return how many tokens a prompt has, or at most has if vLLM tokenizes it later."""
    if isinstance(prompt, Mapping):
        ids = prompt.get("prompt_token_ids")
        if ids is not None:
            return len(ids)
        prompt = prompt.get("prompt")
    # Before 0.20, vLLM tokenizes a text only when it takes the request.
    most = len(prompt.encode()) if isinstance(prompt, str) else 0
    return min(most, room) if room else most
