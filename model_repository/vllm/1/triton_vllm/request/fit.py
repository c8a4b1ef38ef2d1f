"""Check that a request fits the model, before it is tokenized or decoded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triton_vllm.base.errors import InvalidRequestError, UnsupportedError
from triton_vllm.call import GenerateRequest
from triton_vllm.operator.request import OperatorRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from triton_vllm.base.limits import Limits
    from triton_vllm.call import Request
    from triton_vllm.vllm_api import Facts

TOKEN_IDS = (
    "allowed_token_ids",
    "logit_bias",
    "logprob_token_ids",
    "stop_token_ids",
    "trace_decode_token_ids",
)


def check_fit(request: Request, facts: Facts, limits: Limits) -> None:
    """Refuse a request that the model cannot take.

    Raises:
        InvalidRequestError: the prompt is longer than the model takes, or has token ids outside its
            vocabulary.
        UnsupportedError: pictures, audio or video for a model that takes only text.
    """
    if isinstance(request, OperatorRequest):
        return
    chat = request.chat if isinstance(request, GenerateRequest) else None
    if (
        isinstance(request, GenerateRequest)
        and not facts.multimodal
        and (request.media or (chat and chat.media))
    ):
        raise UnsupportedError(
            f"{next(iter(request.media), 'messages')}: this model takes texts only"
        )
    if isinstance(request, GenerateRequest):
        _check_prompt(
            request.text, request.token_ids, chat.characters if chat else 0, facts, limits
        )
        return
    for part in request.parts:
        _check_prompt(part.text, part.token_ids, len(part.second or ""), facts, limits)


def _check_prompt(
    text: str | None, ids: tuple[int, ...] | None, characters: int, facts: Facts, limits: Limits
) -> None:
    if ids is not None:
        if 0 < facts.max_tokens < len(ids):
            raise InvalidRequestError(
                f"the prompt has {len(ids)} tokens, more than this model's maximum of {facts.max_tokens}"
            )
        if (
            not facts.multimodal
        ):  # multimodal models use ids above their vocabulary as placeholders of pictures
            check_ids("the prompt", ids, facts)
    characters += len(text or "")
    if 0 < facts.max_tokens * limits.max_characters_per_token < characters:
        raise InvalidRequestError(
            f"the prompt has {characters} characters, too many for this model's maximum of {facts.max_tokens} tokens; "
            f"it takes at most {facts.max_tokens * limits.max_characters_per_token}"
        )


def check_params(params: Any, facts: Facts) -> None:
    """Refuse token ids outside the vocabulary in vLLM's SamplingParams: they index tables that requests share.

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


def check_ids(name: str, ids: Iterable[int], facts: Facts) -> None:
    """Refuse token ids outside the model's vocabulary.

    Raises:
        InvalidRequestError: there is such an id. The text begins with ``name``.
    """
    largest, smallest = max(ids), min(ids)
    if smallest < 0 or 0 < facts.vocabulary <= largest:
        wrong = smallest if smallest < 0 else largest
        raise InvalidRequestError(
            f"{name}: token id {wrong} is not in the model's vocabulary of {facts.vocabulary} tokens"
        )
