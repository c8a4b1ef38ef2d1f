"""What a request asks for: made by `request`, read by `engine` and `reply`."""

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
    """One prompt to complete; exactly one of text, token_ids and chat is set.

    `media` maps a modality to base64 strings, `parameters` are the sampling parameters as JSON gave them,
    `timeout` is in microseconds as everywhere in Triton (0 = none), `cache_salt` keeps cached prefixes apart, and
    `engine_fields` are those of `ENGINE_FIELDS`.
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


Request = GenerateRequest | EmbedRequest | OperatorRequest
