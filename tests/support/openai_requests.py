"""Requests of today's clients and of future ones, for all paths of the OpenAI port: what both servers are asked."""

from __future__ import annotations

from typing import Any

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
COUNT, TOKENIZE, DETOKENIZE = "/v1/messages/count_tokens", "/tokenize", "/detokenize"
HELLO = [{"role": "user", "content": "Hello!"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "Ask.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
FLAT = {"type": "function", **FUNCTION}
CLAUDES = {"name": "Bash", "description": "Run a command.", "input_schema": PARAMETERS}
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
SCHEMA = {"enum": ["alpha", "beta"]}
NAMESPACE = {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": [FLAT]}

# Fields, each in a request of its own.
OF_A_CHAT: dict[str, Any] = {
    # OpenAI's package
    "audio": {"voice": "alloy", "format": "wav"},
    "function_call": "auto",
    "functions": [FUNCTION],
    "metadata": {"a": "b"},
    "modalities": ["text"],
    "moderation": {"model": "omni"},
    "parallel_tool_calls": False,
    "prediction": {"type": "content", "content": "Hello"},
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "reasoning_effort": "low",
    "safety_identifier": "s",
    "service_tier": "auto",
    "store": True,
    "user": "me",
    "verbosity": "low",
    "web_search_options": {"user_location": {"type": "approximate", "approximate": {"city": "Paris"}}},
    # litellm, LangChain and others
    "best_of": 3,
    "caching": True,
    "drop_params": True,
    "enable_thinking": False,
    "extra_headers": {"x": "y"},
    "guided_json": SCHEMA,
    "mirostat": 2,
    "num_retries": 3,
    "provider": {"order": ["a"]},
    "repeat_penalty": 1.1,
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "transforms": ["middle-out"],
    # vLLM
    "allowed_token_ids": [5, 6, 7],
    "bad_words": ["x"],
    "cache_salt": "salt",
    "chat_template_kwargs": {"enable_thinking": False},
    "documents": [{"title": "a", "text": "b"}],
    "echo": False,
    "include_reasoning": False,
    "logit_bias": {"5": 1},
    "min_p": 0.1,
    "mm_payload": "none",
    "n": 2,
    "repetition_penalty": 1.1,
    "return_prompt_text": True,
    "return_token_ids": True,
    "return_token_offsets": True,
    "seed": 1,
    "stop": ["zz"],
    "structured_outputs": {"choice": ["alpha", "beta"]},
    "top_k": 5,
    "use_beam_search": False,
    # A future one
    "agent_budget": {"tokens": 5, "currency": "EUR", "limits": [{"a": [1, 2]}]},
}
OF_A_TEXT: dict[str, Any] = {
    "best_of": 2,
    "logprobs": 1,
    "echo": True,
    "suffix": None,
    "user": "me",
    "store": True,
    "metadata": {"a": 1},
    "guided_regex": "a+",
    "prompt_logprobs": 1,
    "truncate_prompt_tokens": 5,
    "future_field": [[["x"]]],
}
OF_A_RESPONSE: dict[str, Any] = {
    # Codex
    "client_metadata": {"x-codex-installation-id": "1"},
    "include": ["reasoning.encrypted_content"],
    "parallel_tool_calls": False,
    "prompt_cache_key": "k",
    "store": False,
    "text": {"verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"},
    # OpenAI's package
    "context_management": [{"type": "compaction"}],
    "conversation": "conv_1",
    "max_tool_calls": 3,
    "metadata": {"a": "b"},
    "prompt": None,
    "prompt_cache_options": {"ttl": "30m"},
    "safety_identifier": "s",
    "service_tier": "auto",
    "stream_options": {"include_obfuscation": False},
    "top_logprobs": 2,
    "truncation": "auto",
    "user": "me",
    # vLLM, and a future one
    "structured_outputs": {"choice": ["alpha", "beta"]},
    "top_k": 5,
    "thread": {"id": "t", "parent": None},
}
OF_A_MESSAGE: dict[str, Any] = {
    # Claude Code
    "betas": ["claude-code-20250219", "context-management-2025-06-27"],
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": "user_1_account__session_2"},
    "output_config": {"effort": "high"},
    "system": [{"type": "text", "text": "You are an agent.", **EPHEMERAL}, {"type": "text", "text": "Be short."}],
    "thinking": {"type": "adaptive"},
    "tool_choice": {"type": "auto"},
    # Anthropic's package
    "cache_control": {"type": "ephemeral"},
    "container": "container_1",
    "inference_geo": "eu",
    "mcp_servers": [{"type": "url", "url": "http://127.0.0.1:1/", "name": "x"}],
    "service_tier": "standard_only",
    "speed": "fast",
    "stop_sequences": ["zz"],
    "top_k": 5,
    # A future one
    "agent_budget": {"tokens": 5},
}
TOOLS_OF_A_RESPONSE: list[dict[str, Any]] = [
    FLAT,
    {**FLAT, "strict": False, "defer_loading": True},
    NAMESPACE,
    {"type": "web_search", "external_web_access": False},
    {"type": "web_search", "user_location": {"type": "approximate", "country": "FR", "city": "Paris"}},
    {"type": "web_search", "filters": {"allowed_domains": ["example.com"]}},
    {"type": "web_search_preview"},
    {"type": "local_shell"},
    {"type": "shell"},
    {"type": "apply_patch"},
    {"type": "computer_use_preview", "display_width": 10, "display_height": 10, "environment": "browser"},
    {"type": "file_search", "vector_store_ids": ["v"]},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "image_generation"},
    {"type": "mcp", "server_label": "x", "server_url": "http://127.0.0.1:1/"},
    {"type": "tool_search"},
    {"type": "custom", "name": "apply_patch", "description": "Patch."},
    {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}},
    {"type": "of a future client", "name": "x"},
]
TOOLS_OF_A_MESSAGE: list[dict[str, Any]] = [
    {**CLAUDES, **EPHEMERAL},
    {**CLAUDES, "type": "custom", "defer_loading": True, "allowed_callers": ["direct"], "input_examples": []},
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
    {"type": "bash_20250124", "name": "bash"},
    {"type": "of a future client", "name": "x", "input_schema": {"type": "object"}},
]
CALL = {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": "{}"}
ANSWER = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi"}]}
ITEMS: list[list[dict[str, Any]]] = [
    [{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be short."}]}],
    [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}],
    [CALL, {"type": "function_call_output", "call_id": "c", "output": "Sunny"}],
    [CALL, {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "Sunny"}]}],
    [{**CALL, "namespace": "mcp__files", "id": "fc_1"}, {"type": "function_call_output", "call_id": "c", "output": "x"}],
    [
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "Done"},
    ],
    [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "content": None}],
    [{"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}],
    [{"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}],
    [ANSWER],
    [{**ANSWER, "phase": "commentary"}],
    [{**ANSWER, "id": "msg_1", "status": "completed", "end_turn": True}],
    [{"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}}],
    [
        {
            "type": "local_shell_call",
            "call_id": "c",
            "status": "completed",
            "action": {"type": "exec", "command": ["ls"], "env": {}},
        }
    ],
    [{"type": "item_reference", "id": "msg_1"}],
    [{"type": "mcp_list_tools", "id": "m", "server_label": "x", "tools": []}],
    [{"type": "ghost_snapshot", "ghost_commit": {"id": "x"}}],
    [{"role": 5}],
    [
        {
            "type": "computer_call_output",
            "call_id": "c",
            "output": {"type": "computer_screenshot", "image_url": "http://127.0.0.1:1/"},
        }
    ],
]
TURNS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": [{"type": "text", "text": "Hi", **EPHEMERAL}]}],
    [
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t", "name": "Bash", "input": {"url": "http://x", "image": 1}}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t", "content": "ok", "is_error": False, **EPHEMERAL}],
        },
    ],
    [
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t", "name": "Bash", "input": {}, "caller": {"type": "direct"}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "ok"}]}]},
    ],
    [
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, {"type": "text", "text": "Hi"}],
        }
    ],
    [
        {
            "role": "assistant",
            "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "Hi", "citations": None}],
        }
    ],
    [{"role": "assistant", "content": [{"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}]}],
    [{"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": "x", "media_type": "text/plain"}}]}],
    [{"role": "system", "content": [{"type": "tool_removal", "tool": {"type": "tool_reference", "name": "Bash"}}]}],
]
MESSAGES_OF_A_CHAT: list[list[dict[str, Any]]] = [
    [{"role": "developer", "content": "Be short."}],
    [{"role": "user", "content": [{"type": "text", "text": "Hi", **EPHEMERAL}], "name": "me", "future": {"a": 1}}],
    [
        {"role": "assistant", "content": None, "refusal": None, "audio": None, "tool_calls": [{"id": "c", **TOOL_CALL}]}
        for TOOL_CALL in [{"type": "function", "function": {"name": "get_weather", "arguments": "{}"}}]
    ]
    + [{"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "Sunny"}]}],
    [{"role": "user", "content": [{"type": "file", "file": {"file_id": "f"}}]}],
    [{"role": "assistant", "content": "Hi", "reasoning_content": "Hm.", "annotations": []}],
]
REFUSED_SOMEWHERE: list[tuple[str, str, dict[str, Any]]] = [
    (RESPONSES, "background", {"background": True}),
    (RESPONSES, "a template", {"prompt": {"id": "pmpt_1"}}),
    (RESPONSES, "an earlier response", {"previous_response_id": "resp_1"}),
    (RESPONSES, "all messages", {"enable_response_messages": True}),
    (RESPONSES, "earlier messages", {"previous_input_messages": [{"role": "user", "content": "x"}]}),
    (CHAT, "a template of its own", {"chat_template": "{{ messages }}"}),
    (CHAT, "a name for the request", {"request_id": "mine"}),
    (CHAT, "a session", {"session_id": "mine"}),
    (CHAT, "beams", {"use_beam_search": True, "n": 2}),
    (CHAT, "arguments of extensions", {"vllm_xargs": {"a": 1}}),
    (CHAT, "a transfer", {"kv_transfer_params": {"a": 1}}),
    (CHAT, "arguments of a processor", {"mm_processor_kwargs": {"a": 1}}),
    (TEXT, "a tensor", {"prompt_embeds": "AAAA"}),
]
OTHERS: list[tuple[str, str, dict[str, Any]]] = [
    (COUNT, "plain", {"messages": HELLO}),
    (
        COUNT,
        "with tools",
        {"messages": HELLO, "tools": [{**CLAUDES, **EPHEMERAL}], "betas": ["x"], "thinking": {"type": "disabled"}},
    ),
    (TOKENIZE, "a text", {"prompt": "Hello", "future": 1}),
    (TOKENIZE, "a chat", {"messages": HELLO, "tools": [TOOL], "user": "me"}),
    (DETOKENIZE, "ids", {"tokens": [5, 6], "skip_special_tokens": True}),
    ("/v1/embeddings", "a text", {"input": "x"}),
    ("/v1/score", "texts", {"text_1": "x", "text_2": "y"}),
    (CHAT, "no messages", {"messages": None}),
    (TEXT, "no prompt", {"prompt": None}),
    (CHAT, "tools that are a text", {"messages": HELLO, "tools": "x"}),
    (CHAT, "a tool of another kind", {"messages": HELLO, "tools": [{"type": "custom", "custom": {"name": "x"}}]}),
    (CHAT, "a tool", {"messages": HELLO, "tools": [{**TOOL, "future": 1}], "tool_choice": "auto"}),
    (CHAT, "a tool that must be called", {"messages": HELLO, "tools": [TOOL], "tool_choice": "required", "max_tokens": 64}),
    (f"{MESSAGES}?beta=true", "as Claude Code asks", {"messages": HELLO}),
]
PATHS: list[tuple[str, str]] = [
    *(
        ("GET", path)
        for path in ("/health", "/ping", "/load", "/version", "/v1/models", "/v1/models/vllm", "/v1/responses/resp_1")
    ),
    *(("HEAD", path) for path in ("/v1/models", "/health")),
    *(
        ("POST", path)
        for path in ("/v1/responses/resp_1/cancel", "/v1/audio/transcriptions", "/v1/load_lora_adapter", "/v1/files")
    ),
    *(("GET", path) for path in ("/openapi.json", "/tokenizer_info", "/v1/unknown", "/v1/chat/completions")),
    *(("POST", path) for path in ("/invocations", "/v1/chat/completions/render")),
]
BASES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": 4},
    TEXT: {"prompt": "Hello", "max_tokens": 4},
    RESPONSES: {"input": "Hello!", "max_output_tokens": 4},
    MESSAGES: {"messages": HELLO, "max_tokens": 4},
}


def requests() -> dict[str, tuple[str, str, dict[str, Any] | None]]:
    """Return method, path and body of each request under its name."""
    made: list[tuple[str, str, dict[str, Any]]] = []
    for path, fields in ((CHAT, OF_A_CHAT), (TEXT, OF_A_TEXT), (RESPONSES, OF_A_RESPONSE), (MESSAGES, OF_A_MESSAGE)):
        made += [(path, name, {name: value}) for name, value in fields.items()]
    made += [(RESPONSES, f"tool {number}, {one['type']}", {"tools": [one]}) for number, one in enumerate(TOOLS_OF_A_RESPONSE)]
    made += [(MESSAGES, f"tool {number}, {one['name']}", {"tools": [one]}) for number, one in enumerate(TOOLS_OF_A_MESSAGE)]
    user = {"role": "user", "content": "Hello!"}
    made += [
        (RESPONSES, f"items {number}, {some[0].get('type')}", {"input": [user, *some, user]}) for number, some in enumerate(ITEMS)
    ]
    made += [(MESSAGES, f"turns {number}", {"messages": [user, *some, user]}) for number, some in enumerate(TURNS)]
    made += [(CHAT, f"messages {number}", {"messages": [user, *some, user]}) for number, some in enumerate(MESSAGES_OF_A_CHAT)]
    made += REFUSED_SOMEWHERE
    bodies: dict[str, tuple[str, str, dict[str, Any] | None]] = {
        f"{path}: {name}": ("POST", path, {"model": "vllm", **BASES.get(path.partition("?")[0], {}), **fields})
        for path, name, fields in [*made, *OTHERS]
    }
    return bodies | {f"{method} {path}": (method, path, {} if method == "POST" else None) for method, path in PATHS}
