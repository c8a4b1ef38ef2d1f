"""The classes of requests to vLLM's own server.

A field is taken unless ``triton_vllm.openai.fields`` refuses it.
"""

from __future__ import annotations

_SERVER = "vllm.entrypoints"
BODIES = (
    f"{_SERVER}.openai.chat_completion.protocol.ChatCompletionRequest",
    f"{_SERVER}.openai.completion.protocol.CompletionRequest",
    f"{_SERVER}.openai.responses.protocol.ResponsesRequest",
    f"{_SERVER}.anthropic.protocol.AnthropicMessagesRequest",
    f"{_SERVER}.anthropic.protocol.AnthropicCountTokensRequest",
    f"{_SERVER}.pooling.embed.protocol.EmbeddingChatRequest",
    f"{_SERVER}.pooling.embed.protocol.EmbeddingCompletionRequest",
    f"{_SERVER}.pooling.scoring.protocol.RerankRequest",
    f"{_SERVER}.pooling.scoring.protocol.ScoreDataRequest",
    f"{_SERVER}.pooling.scoring.protocol.ScoreQueriesDocumentsRequest",
    f"{_SERVER}.pooling.scoring.protocol.ScoreQueriesItemsRequest",
    f"{_SERVER}.pooling.scoring.protocol.ScoreTextRequest",
    f"{_SERVER}.serve.tokenize.protocol.TokenizeChatRequest",
    f"{_SERVER}.serve.tokenize.protocol.TokenizeCompletionRequest",
    f"{_SERVER}.serve.tokenize.protocol.DetokenizeRequest",
)
