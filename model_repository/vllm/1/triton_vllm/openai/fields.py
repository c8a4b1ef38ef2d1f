"""The paths that are served, and the fields that no request may set.

vLLM's own classes say which fields there are. vLLM ignores all others, and they do not reach it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Route:
    """A path that is served.

    Attributes:
        method: GET or POST.
        prompts: the fields with a text, tokens, or a list of them.
        conversation: the fields that the chat template gets.
        media: whether ``messages`` may have pictures, audio and video.
        unions: the lists whose items are of one of many classes, each with the most JSON values of
            an item.
        refused: fields of this path's classes that no request may set, with the reason. Those of
            ``REFUSED`` are refused on every path.
    """

    method: str
    prompts: tuple[str, ...] = ()
    conversation: tuple[str, ...] = ()
    media: bool = False
    unions: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)


_CONVERSATION = ("messages", "tools", "documents", "system", "instructions")
_SCORE = Route(
    "POST",
    prompts=("query", "documents", "queries", "items", "text_1", "text_2", "data_1", "data_2"),
)
PROBES = ("/health", "/ping")
"""The paths that say whether the model is ready. They need no key."""
ROUTES: dict[str, Route] = {
    **dict.fromkeys((*PROBES, "/version", "/metrics", "/load", "/v1/models"), Route("GET")),
    "/v1/completions": Route("POST", prompts=("prompt", "suffix")),
    "/v1/chat/completions": Route("POST", conversation=_CONVERSATION, media=True),
    "/v1/responses": Route(
        "POST",
        conversation=("input", *_CONVERSATION),
        # For an item of 256 values, vLLM's class makes up to 15,000 errors in 0.2 s. A tool may be
        # a namespace of hundreds, for which it makes two errors for each value.
        unions={"input": 256, "tools": 4096},
        refused={
            "background": "no response is kept",
            "enable_response_messages": "each token would get a message with the whole prompt",
            "previous_input_messages": "its messages would not be checked",
            "previous_response_id": "no response is kept",
            "prompt": "it names a template that the server would keep",
        },
    ),
    "/v1/messages": Route("POST", conversation=_CONVERSATION),
    "/v1/messages/count_tokens": Route("POST", conversation=_CONVERSATION),
    "/v1/embeddings": Route("POST", prompts=("input",), conversation=_CONVERSATION, media=True),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score"), _SCORE),
    "/tokenize": Route("POST", prompts=("prompt",), conversation=_CONVERSATION, media=True),
    "/detokenize": Route("POST", prompts=("tokens",)),
}

REFUSED: dict[str, str] = {
    "chat_template": "the operator chooses the template",
    "ec_transfer_params": "it is for other engines",
    "kv_transfer_params": "it is for other engines",
    "media_io_kwargs": "it changes what decoding costs",
    "mm_processor_kwargs": "it changes what a picture costs",
    "padding": "it makes every text as long as the model takes",
    "prompt_embeds": "it is a program's tensor",
    "request_id": "a client could stop another client's request by its id",
    "session_id": "a client could name another client's session to a router",
    "use_beam_search": "one request would be many",
    "vllm_xargs": "it is for programs inside the engine",
}
"""Fields that no request may set, with the reason."""
