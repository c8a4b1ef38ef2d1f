"""Limit the minimum length of an answer to the room that the model has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def bound_minimum(params: Any, prompt: Any, most: int) -> None:
    """Lower ``min_tokens`` to the room that a prompt leaves.

    Args:
        params: vLLM's SamplingParams or PoolingParams. Changed in place.
        prompt: as ``add_request`` takes it. A prompt without token ids is not checked.
        most: tokens of a prompt and its answer together. 0 means unknown.
    """
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
    if not most or ids is None:
        return
    # In vLLM 0.28, an answer that is shorter than its minimum does not end at the model's length.
    # It never ends. In 0.32 it does (29 November 2026), so this may go with 0.28.
    left = max(most - len(ids), 0)
    if getattr(params, "min_tokens", 0) > left:
        params.min_tokens = left
