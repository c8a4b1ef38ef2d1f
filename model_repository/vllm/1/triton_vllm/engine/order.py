"""What a job asks of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triton_vllm.chat.request import Chat
    from triton_vllm.constraints.checks import Constraint
    from triton_vllm.vllm_api import Conversation


@dataclass(frozen=True)
class Prompt:
    """One input of vLLM; exactly one of ``text``, ``token_ids`` and ``chat`` is set.

    Attributes:
        text: the prompt as text.
        token_ids: the prompt as token ids.
        chat: the prompt as a conversation.
        second: a text that a cross-encoder reads together with ``text``.
        media: base64 strings for each kind of media.
        constraint: a constraint of the answer that vLLM must compile, if there is one.
        cache_salt: prompts with different salts share no cached prefixes.
    """

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    chat: Chat | None = None
    second: str | None = None
    media: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    constraint: Constraint | None = None
    cache_salt: str | None = None

    @property
    def characters(self) -> int:
        """The length of all that will be tokenized."""
        if self.chat is not None:
            return self.chat.characters
        return len(self.text or "") + len(self.second or "")

    @property
    def media_source(self) -> str | None:
        """The input with pictures, audio or video; None if the request has no such input."""
        if self.chat is not None and self.chat.media:
            return "messages"
        return next(iter(self.media), None)


# The text of an order would show a client's prompt.
@dataclass(frozen=True, repr=False)
class Order:
    """A checked request, as vLLM will be asked.

    Attributes:
        prompts: vLLM takes one input at a time, so each becomes a request of its own there.
        params: vLLM's SamplingParams or PoolingParams.
        completions: the completions of each prompt.
        streams: whether the client wants new tokens as soon as they exist.
        lora_name: the name of a LoRA adapter. None for the base model.
        priority: as vLLM's scheduler has it. A lower number goes first.
        timeout: microseconds, as everywhere in Triton. With 0 there is no timeout.
        options: additional keyword arguments of vLLM's ``add_request``.
        conversation: the chat for the parsers, if the model has parsers. Otherwise None.
        most_numbers: the most numbers in the answer to a pooling request, which has one output. 0
            means no limit. None for a request that generates.
    """

    prompts: tuple[Prompt, ...]
    params: Any
    completions: int = 1
    streams: bool = False
    lora_name: str | None = None
    priority: int = 0
    timeout: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    conversation: Conversation | None = None
    most_numbers: int | None = None

    @property
    def weight(self) -> int:
        """How many requests it counts for: one for each prompt and each completion."""
        return len(self.prompts) * self.completions
