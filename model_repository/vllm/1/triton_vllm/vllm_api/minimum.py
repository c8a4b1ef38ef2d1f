"""Keep the least length of an answer within what the model has room for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def bound_minimum(params: Any, prompt: Any, most: int) -> None:
    """Lower `min_tokens` to the room that a prompt leaves.

    In vLLM 0.28 an answer that is shorter than its minimum does not end at the model's length, but never.

    Args:
        params: vLLM's SamplingParams, changed in place, or PoolingParams.
        prompt: as `add_request` takes it; one that is not tokenized yet is let pass.
        most: tokens of a prompt and its answer together; 0 is not known.
    """
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
    if most and ids is not None and getattr(params, "min_tokens", 0) > most - len(ids):
        params.min_tokens = max(most - len(ids), 0)
