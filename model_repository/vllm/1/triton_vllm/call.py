"""The content of a request: ``request`` makes it, ``engine`` and ``reply`` read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from triton_vllm.operator.request import OperatorRequest
from triton_vllm.pooling.embedding import EmbedRequest

if TYPE_CHECKING:
    from triton_vllm.base.wants import Wants
    from triton_vllm.chat.request import Chat
    from triton_vllm.constraints.checks import Constraint


@dataclass(frozen=True)
class GenerateRequest:
    """One prompt to complete; exactly one of ``text``, ``token_ids`` and ``chat`` is set.

    Attributes:
        text: the prompt as text.
        token_ids: the prompt as token ids.
        chat: the prompt as a conversation.
        stream: whether the client wants new tokens as soon as they exist.
        echo: whether the prompt precedes the answer.
        wants: the optional outputs that the client asked for.
        parameters: the sampling parameters, as JSON has them.
        media: base64 strings for each kind of media.
        lora_name: the name of a LoRA adapter. None for the base model.
        priority: as vLLM's scheduler has it. A lower number goes first.
        timeout: microseconds, as everywhere in Triton. With 0 there is no timeout.
        constraint: a constraint of the answer that vLLM must compile, if the request has one.
        cache_salt: requests with different salts share no cached prefixes.
        engine_fields: the fields that are in ``ENGINE_FIELDS``.
    """

    text: str | None
    token_ids: tuple[int, ...] | None
    chat: Chat | None
    stream: bool
    echo: bool
    wants: Wants
    parameters: Mapping[str, Any]
    media: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    lora_name: str | None = None
    priority: int = 0
    timeout: int = 0
    constraint: Constraint | None = None
    cache_salt: str | None = None
    engine_fields: Mapping[str, Any] = field(default_factory=dict)


# Code that needs to know the kind of a request asks with ``isinstance``.
Request = GenerateRequest | EmbedRequest | OperatorRequest
