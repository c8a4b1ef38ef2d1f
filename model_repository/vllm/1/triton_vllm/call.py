"""What a request asks for: made by admission, read by inference and delivery."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
    """Which optional outputs the request asks for; with `no_logprobs` its `logprobs` is null, for vLLM was asked for none."""

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
    no_logprobs: bool = False


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


ENGINE_FIELDS = ("extra_args", "kv_transfer_params", "session_id", "data_parallel_rank")
"""What else vLLM takes with a request, if the operator allows it."""


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


@dataclass(frozen=True)
class Part:
    """One input of a pooling request: a text, token ids, or two texts that a cross-encoder reads together."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    second: str | None = None


@dataclass(frozen=True)
class Scoring:
    """Pairs of texts to score: one query for all documents, or one for each.

    `ranked` asks for the best documents first, at most `top` of them (0 = all).
    """

    queries: tuple[str, ...]
    documents: tuple[str, ...]
    ranked: bool = False
    top: int = 0


@dataclass(frozen=True)
class EmbedRequest:
    """Inputs to embed, pool or score, each a request of vLLM's own, with vLLM's pooling parameters."""

    parts: tuple[Part, ...]
    wants: Wants
    task: str
    parameters: Mapping[str, Any]
    lora_name: str | None = None
    priority: int = 0
    timeout: int = 0
    scoring: Scoring | None = None


OPERATIONS: Mapping[str, tuple[str, ...]] = {
    "sleep": ("level",),
    "wake_up": (),
    "is_sleeping": (),
    "reset_prefix_cache": (),
    "load_lora": ("name",),
}
"""What an operator may ask for, with its arguments."""


@dataclass(frozen=True)
class OperatorRequest:
    """One of `OPERATIONS`, for the engine itself."""

    operation: str
    arguments: Mapping[str, Any]
    timeout: int = 0
    priority: int = 0
    lora_name: str | None = None


Request = GenerateRequest | EmbedRequest | OperatorRequest
