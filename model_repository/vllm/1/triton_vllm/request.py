"""What a request asks for: made by admission, read by inference and delivery."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Chat:
    """A conversation for the model's chat template.

    `characters` counts those of messages and tools in JSON, without the pictures, audios and videos that `media` tells of;
    `tool_choice` is none, auto, required or an object that names a function, as in the OpenAI protocol.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    characters: int = 0
    media: bool = False
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool | None = None


@dataclass(frozen=True)
class Wants:
    """Which optional outputs the request asks for."""

    finish_reason: bool = False
    cumulative_logprob: bool = False
    logprobs: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False
    token_ids: bool = False
    stop_reason: bool = False
    prompt_logprobs: bool = False
    num_cached_tokens: bool = False


@dataclass(frozen=True)
class Constraint:
    """What the answer must match, as it is compiled.

    `name` is the request's field, `kind` one of json, regex, grammar, lark and structural_tag; `seconds` of a processor are the
    most that compiling may take.
    """

    name: str
    kind: str
    text: str
    seconds: int


@dataclass(frozen=True)
class GenerateRequest:
    """One prompt to complete; exactly one of text, token_ids and chat is set.

    `media` maps a modality to base64 strings, `parameters` are the sampling parameters as JSON gave them,
    `timeout` is in microseconds as everywhere in Triton (0 = none).
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


@dataclass(frozen=True)
class EmbedRequest:
    """One input to embed or pool: a text or token ids, with vLLM's pooling parameters."""

    text: str | None
    token_ids: tuple[int, ...] | None
    wants: Wants
    task: str
    parameters: Mapping[str, Any]
    lora_name: str | None = None
    priority: int = 0
    timeout: int = 0


Request = GenerateRequest | EmbedRequest
