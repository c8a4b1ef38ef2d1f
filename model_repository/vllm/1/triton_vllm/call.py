"""The content of a request: `request` makes it, `engine` and `reply` read it."""

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
    """One prompt to complete; exactly one of `text`, `token_ids` and `chat` is set.

    Attributes:
        media: base64 strings for each kind of media.
        parameters: the sampling parameters, as JSON has them.
        timeout: microseconds, as everywhere in Triton. With 0 there is no timeout.
        cache_salt: requests with different salts share no cached prefixes.
        engine_fields: the fields that are in `ENGINE_FIELDS`.
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
