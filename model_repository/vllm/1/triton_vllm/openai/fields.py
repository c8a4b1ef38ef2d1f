"""The paths that are served, and the fields that a request may have on each.

The lists were made from the request classes of vLLM 0.28 to 0.32. A field of a newer vLLM is
refused until somebody has read what it does and has added it here: to one of the lists, or to
``REFUSED``. Older versions lack some of the fields. They ignore these, as vLLM's own server does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True)
class Route:
    """A path that is served.

    Attributes:
        method: GET or POST.
        fields: the fields of the body. Empty for GET.
        classes: vLLM's classes of the body.
        prompts: the fields with a text, tokens, or a list of them.
        conversation: the fields that the chat template gets.
        media: whether ``messages`` may have pictures, audio and video.
    """

    method: str
    fields: frozenset[str] = frozenset()
    classes: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    conversation: tuple[str, ...] = ()
    media: bool = False


# These say who asks or how the client is billed. They reach no tokenizer, file or network.
_LABELS = {
    "metadata", "model", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "safety_identifier", "service_tier", "store", "user", "verbosity",
}  # fmt: skip
_SCHEDULING = {"cache_salt", "priority"}
_SAMPLING = {
    "frequency_penalty", "ignore_eos", "include_stop_str_in_output", "logit_bias", "min_p",
    "presence_penalty", "repetition_penalty", "seed", "skip_special_tokens", "stop",
    "stop_token_ids", "stream", "structured_outputs", "temperature", "top_k", "top_p",
    "watermarking",
}  # fmt: skip
_GENERATION = _SAMPLING | {
    "add_special_tokens", "allowed_token_ids", "bad_words", "echo", "length_penalty",
    "logprob_token_ids", "logprobs", "max_tokens", "min_tokens", "n", "prompt_logprobs",
    "repetition_detection", "response_format", "return_token_ids", "return_tokens_as_token_ids",
    "routed_experts_prompt_start", "spaces_between_special_tokens", "stream_interval",
    "stream_options", "thinking_token_budget", "truncate_prompt_tokens", "truncation_side",
}  # fmt: skip
_TEMPLATE = {
    "add_generation_prompt", "chat_template_kwargs", "continue_final_message", "messages",
}  # fmt: skip
_TOOLS = {"parallel_tool_calls", "tool_choice", "tools"}
_POOLING = {"truncate_prompt_tokens", "truncation_side", "use_activation"}
_ANTHROPIC = {
    "chat_template_kwargs", "messages", "output_config", "system", "thinking", "tool_choice",
    "tools",
}  # fmt: skip
_CHAT = {
    "documents", "include_reasoning", "max_completion_tokens", "reasoning_effort",
    "return_prompt_text", "top_logprobs",
}  # fmt: skip
_RESPONSES = {
    "chat_template_kwargs", "include", "include_reasoning", "input", "instructions",
    "max_output_tokens", "max_tool_calls", "reasoning", "stream_options", "text", "top_logprobs",
    "truncation",
}  # fmt: skip
_MESSAGES = {
    "cache_salt", "max_tokens", "stop_sequences", "stream", "temperature", "top_k", "top_p",
    "watermarking",
}  # fmt: skip
_EMBEDDINGS = {
    "add_special_tokens", "dimensions", "embed_dtype", "encoding_format", "endianness", "input",
}  # fmt: skip
_SCORED = ("query", "documents", "queries", "items", "text_1", "text_2", "data_1", "data_2")
_SCORING = {
    "chat_template_kwargs", "instruction", "max_tokens_per_doc", "max_tokens_per_query", "top_n",
}  # fmt: skip
_CONVERSATION = ("messages", "tools", "documents", "system", "instructions")


def _post(
    *fields: Iterable[str],
    classes: tuple[str, ...],
    prompts: tuple[str, ...] = (),
    conversation: tuple[str, ...] = (),
    media: bool = False,
) -> Route:
    known = frozenset(_LABELS).union(*fields)
    return Route("POST", known, classes, prompts, conversation, media)


_SCORE = _post(
    _SCHEDULING,
    _POOLING,
    _SCORED,
    _SCORING,
    classes=(
        "RerankRequest",
        "ScoreDataRequest",
        "ScoreQueriesDocumentsRequest",
        "ScoreQueriesItemsRequest",
        "ScoreTextRequest",
    ),
    prompts=_SCORED,
)

ROUTES: dict[str, Route] = {
    **dict.fromkeys(("/health", "/version", "/metrics", "/v1/models"), Route("GET")),
    "/v1/completions": _post(
        _SCHEDULING,
        _GENERATION,
        ("prompt", "suffix"),
        classes=("CompletionRequest",),
        prompts=("prompt", "suffix"),
    ),
    "/v1/chat/completions": _post(
        _SCHEDULING,
        _GENERATION,
        _TEMPLATE,
        _TOOLS,
        _CHAT,
        classes=("ChatCompletionRequest",),
        conversation=_CONVERSATION,
        media=True,
    ),
    "/v1/responses": _post(
        _SCHEDULING,
        _SAMPLING,
        _TOOLS,
        _RESPONSES,
        classes=("ResponsesRequest",),
        conversation=("input", *_CONVERSATION),
    ),
    "/v1/messages": _post(
        _ANTHROPIC,
        _MESSAGES,
        classes=("AnthropicMessagesRequest",),
        conversation=_CONVERSATION,
    ),
    "/v1/messages/count_tokens": _post(
        _ANTHROPIC,
        classes=("AnthropicCountTokensRequest",),
        conversation=_CONVERSATION,
    ),
    "/v1/embeddings": _post(
        _SCHEDULING,
        _POOLING,
        _TEMPLATE,
        _EMBEDDINGS,
        classes=("EmbeddingChatRequest", "EmbeddingCompletionRequest"),
        prompts=("input",),
        conversation=_CONVERSATION,
        media=True,
    ),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score"), _SCORE),
    "/tokenize": _post(
        _TEMPLATE,
        ("add_special_tokens", "prompt", "return_token_strs", "tools"),
        classes=("TokenizeChatRequest", "TokenizeCompletionRequest"),
        prompts=("prompt",),
        conversation=_CONVERSATION,
        media=True,
    ),
    "/detokenize": _post(("tokens",), classes=("DetokenizeRequest",), prompts=("tokens",)),
}

WITHOUT_EFFECT: dict[str, Any] = {
    "best_of": 1,
    "modalities": ["text"],
    # LiteLLM sends it with each rerank.
    "return_documents": True,
}
"""Fields that vLLM does not have, each with the value that asks for what vLLM does."""

REFUSED: dict[str, str] = {
    "background": "no response is kept",
    "chat_template": "the operator chooses the template",
    "ec_transfer_params": "it is for other engines",
    "enable_response_messages": "it is for tests of vLLM",
    "kv_transfer_params": "it is for other engines",
    "media_io_kwargs": "it changes what decoding costs",
    "mm_payload": "it is for other servers",
    "mm_processor_kwargs": "it changes what a picture costs",
    "padding": "it makes every text as long as the model takes",
    "previous_input_messages": "no response is kept",
    "previous_response_id": "no response is kept",
    "prompt_embeds": "it is a program's tensor",
    "request_id": "a client could stop another client's request by its id",
    "return_mm_kwargs": "it is for other servers",
    "return_token_offsets": "it is for other servers",
    "session_id": "it is for other servers",
    "use_beam_search": "one request would be many",
    "vllm_xargs": "it is for programs inside the engine",
}
"""Fields of vLLM's classes that no request may set, with the reason.

``prompt`` is refused for responses, where it names a template that the server would keep.
"""
