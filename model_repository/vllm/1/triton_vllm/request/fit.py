"""Check that a request fits the model, before it is tokenized or decoded."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from triton_vllm.base.errors import InvalidRequestError, UnsupportedError
from triton_vllm.base.limits import TOKEN_IDS, context_length
from triton_vllm.operator.request import OperatorRequest
from triton_vllm.pooling.embedding import EmbedRequest

if TYPE_CHECKING:
    from collections.abc import Collection

    from triton_vllm.base.limits import Limits
    from triton_vllm.call import Request
    from triton_vllm.vllm_api import Facts


# After each token, vLLM compares all patterns in the process that serves all requests. That takes
# up to half as many comparisons. Without a limit, one token took 8 s (20,000 tokens, vLLM 0.32).
MOST_REPETITION = 1 << 15
"""The most that ``max_pattern_size`` squared, times ``min_count``, may be."""


def check_fit(request: Request, facts: Facts, limits: Limits) -> None:
    """Refuse a request that the model cannot take.

    Raises:
        InvalidRequestError: the prompt is longer than the model takes, or has token ids outside its
            vocabulary.
        UnsupportedError: pictures, audio or video for a model that takes only text.
    """
    if isinstance(request, OperatorRequest):
        return
    if isinstance(request, EmbedRequest):
        for part in request.parts:
            _check_ids_of_prompt(part.token_ids, facts)
            _check_length(len(part.text or "") + len(part.second or ""), facts, limits)
        return
    chat = request.chat
    if not facts.multimodal and (request.media or (chat and chat.media)):
        source = next(iter(request.media), "messages")
        raise UnsupportedError(f"{source}: this model takes texts only")
    _check_ids_of_prompt(request.token_ids, facts)
    _check_length(chat.characters if chat else len(request.text or ""), facts, limits)


def check_prompt_ids(name: str, ids: Collection[int], facts: Facts) -> None:
    """Refuse the token ids of a prompt that would stop the engine.

    Raises:
        InvalidRequestError: there is such an id. The text begins with ``name``.
    """
    # Multimodal models use ids above their vocabulary as placeholders of pictures.
    known = replace(facts, vocabulary=0) if facts.multimodal else facts
    if ids:
        check_ids(name, ids, known)


def _check_ids_of_prompt(ids: tuple[int, ...] | None, facts: Facts) -> None:
    if ids is None:
        return
    if 0 < facts.max_tokens < len(ids):
        raise InvalidRequestError(
            f"the prompt has {len(ids)} tokens; {context_length(facts.max_tokens)}"
        )
    check_prompt_ids("the prompt", ids, facts)


def _check_length(characters: int, facts: Facts, limits: Limits) -> None:
    # Such a text hardly ever fits, so no time is spent on tokenizing it.
    most = facts.max_tokens * limits.max_characters_per_token
    if 0 < most < characters:
        raise InvalidRequestError(
            f"the prompt has {characters} characters; {context_length(facts.max_tokens)}, "
            f"so it takes at most {most} characters"
        )


def check_params(params: Any, facts: Facts) -> None:
    """Refuse values in vLLM's SamplingParams that harm other requests.

    Raises:
        InvalidRequestError: a parameter has such an id. The text names the parameter.
        UnsupportedError: ``prompt_logprobs`` for an engine that does not survive it.
    """
    if getattr(params, "prompt_logprobs", None) is not None and not facts.prompt_logprobs:
        raise UnsupportedError(
            "prompt_logprobs: vLLM on a CPU cannot compute them for a model with enable_lora"
        )
    for name in TOKEN_IDS:
        ids = getattr(params, name, None)
        if ids:
            check_ids(name, ids, facts)
    _check_repetition(getattr(params, "repetition_detection", None))


def _check_repetition(wanted: Any) -> None:
    size = getattr(wanted, "max_pattern_size", 0)
    cost = size * size * getattr(wanted, "min_count", 0)
    if cost > MOST_REPETITION:
        raise InvalidRequestError(
            f"repetition_detection: max_pattern_size {size} squared, times min_count, is {cost}; "
            f"this model takes at most {MOST_REPETITION}"
        )


def check_ids(name: str, ids: Collection[int], facts: Facts) -> None:
    """Refuse token ids outside the model's vocabulary.

    Raises:
        InvalidRequestError: there is such an id. The text begins with ``name``.
    """
    # A prompt may have a hundred thousand ids, and these two functions loop in C.
    for token in (min(ids), max(ids)):
        if token < 0:
            raise InvalidRequestError(f"{name}: token id {token} is negative")
        # A vocabulary of 0 is unknown.
        if 0 < facts.vocabulary <= token:
            raise InvalidRequestError(
                f"{name}: token id {token} "
                f"is not in the model's vocabulary of {facts.vocabulary} tokens"
            )
