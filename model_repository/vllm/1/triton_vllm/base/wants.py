"""The optional outputs that a request asks for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wants:
    """The optional outputs that a request asks for."""

    finish_reason: bool = False
    cumulative_logprob: bool = False
    logprobs: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False
    token_ids: bool = False
    stop_reason: bool = False
    prompt_logprobs: bool = False
    kv_transfer_params: bool = False
    num_cached_tokens: bool = False
