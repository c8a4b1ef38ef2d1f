"""What somebody has read about the fields of the pinned vLLM's requests.

The product has no such list: there, a field of vLLM is taken unless `REFUSED` or its route's `refused` names it. So a field of
a newer vLLM is taken at once, and tests/contract/test_openai_fields.py names it until it is here or refused.
"""

from __future__ import annotations

_SCORE = (
    "RerankRequest",
    "ScoreDataRequest",
    "ScoreQueriesDocumentsRequest",
    "ScoreQueriesItemsRequest",
    "ScoreTextRequest",
)
CLASSES: dict[str, tuple[str, ...]] = {
    "/v1/completions": ("CompletionRequest",),
    "/v1/chat/completions": ("ChatCompletionRequest",),
    "/v1/responses": ("ResponsesRequest",),
    "/v1/messages": ("AnthropicMessagesRequest",),
    "/v1/messages/count_tokens": ("AnthropicCountTokensRequest",),
    "/v1/embeddings": ("EmbeddingChatRequest", "EmbeddingCompletionRequest"),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), ("RerankRequest",)),
    **dict.fromkeys(("/score", "/v1/score"), _SCORE[1:]),
    "/tokenize": ("TokenizeChatRequest", "TokenizeCompletionRequest"),
    "/detokenize": ("DetokenizeRequest",),
}
"""vLLM's classes of the body of each path. test_model_openai.py compares them with vLLM's application."""
MODULES = {
    "openai.chat_completion": ("ChatCompletionRequest",),
    "openai.completion": ("CompletionRequest",),
    "openai.responses": ("ResponsesRequest",),
    "anthropic": ("AnthropicMessagesRequest", "AnthropicCountTokensRequest"),
    "pooling.embed": ("EmbeddingChatRequest", "EmbeddingCompletionRequest"),
    "pooling.scoring": _SCORE,
    "serve.tokenize": ("TokenizeChatRequest", "TokenizeCompletionRequest", "DetokenizeRequest"),
}
"""Where the pinned vLLM has these classes, in `protocol.py` of `vllm.entrypoints`."""
LABELS = {"metadata", "model", "prompt_cache_key", "service_tier", "user"}
"""They say who asks, or how the client is billed. They reach no tokenizer, file or network."""
BOUNDED = {
    # By `check_amounts`, the cost of a request, or their number of values.
    "allowed_token_ids", "bad_words", "logit_bias", "logprob_token_ids", "logprobs", "max_tokens", "min_tokens", "n",
    "prompt_logprobs", "repetition_detection", "stop", "stop_sequences", "stop_token_ids", "stream_interval", "top_logprobs",
    # By their characters, parts, items, tokens, or errors.
    "chat_template_kwargs", "data_1", "data_2", "documents", "input", "instruction", "instructions", "items", "messages",
    "prompt", "queries", "query", "suffix", "system", "text_1", "text_2", "tokens", "tools",
    # As constraints.
    "output_config", "response_format", "structured_outputs", "text",
}  # fmt: skip
HARMLESS = {
    # One number, one choice, or a few of them, for the sampler, the template or the form of the answer.
    "add_generation_prompt", "add_special_tokens", "cache_salt", "continue_final_message", "dimensions", "echo",
    "embed_dtype", "encoding_format", "endianness", "frequency_penalty", "ignore_eos", "include", "include_reasoning",
    "include_stop_str_in_output", "length_penalty", "max_completion_tokens", "max_output_tokens", "max_tokens_per_doc",
    "max_tokens_per_query", "min_p", "parallel_tool_calls", "presence_penalty", "priority", "reasoning", "reasoning_effort",
    "repetition_penalty", "return_prompt_text", "return_token_ids", "return_token_strs", "return_tokens_as_token_ids",
    "routed_experts_prompt_start", "seed", "skip_special_tokens", "spaces_between_special_tokens", "stream", "stream_options",
    "temperature", "thinking", "thinking_token_budget", "tool_choice", "top_k", "top_n", "top_p", "truncate_prompt_tokens",
    "truncation", "truncation_side", "use_activation", "watermarking",
    # Calls of tools run on the client, and `tool_server` is refused.
    "max_tool_calls",
    # vLLM reads these on paths for rendering only, which are not served. Elsewhere it ignores them.
    "mm_payload", "return_mm_kwargs", "return_token_offsets",
    # vLLM keeps responses only with VLLM_ENABLE_RESPONSES_API_STORE, with which the model does not load.
    "store",
}  # fmt: skip
JUDGED = LABELS | BOUNDED | HARMLESS
