"""Attacks on what the OpenAI port takes because vLLM does: fields that nobody knows, tools and items of all kinds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hostile.corpus import nested
from hostile.openai_corpus import CHAT, HELLO, MB, MESSAGES, RESPONSES, SHORT, TEXT, USER, Shot, ask, raw
from support.openai_requests import FLAT, ITEMS, TOOLS_OF_A_RESPONSE

SAID: dict[str, Any] = {"input": "x", "max_output_tokens": 4}
CLAUDES = {"messages": USER, "max_tokens": 4}
CALL = {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "x"}
IMAGE = {"type": "input_image", "image_url": "http://127.0.0.1:1/"}


def tools(name: str, some: Any, says: str = "", **more: Any) -> Shot:
    """Return a response with these tools."""
    return ask(f"tools: {name}", RESPONSES, {**SAID, "tools": some}, says, **more)


def items(name: str, some: Any, says: str = "", **more: Any) -> Shot:
    """Return a response to these items."""
    return ask(f"items: {name}", RESPONSES, {"input": some, "max_output_tokens": 4}, says, **more)


def filters(levels: int) -> Any:
    """Return a filter of two filters each, as deep as this."""
    if not levels:
        return {"type": "eq", "key": "a", "value": "b"}
    return {"type": "and", "filters": [filters(levels - 1)] * 2}


def namespaces(levels: int) -> Any:
    """Return a namespace in a namespace, as deep as this."""
    inner = namespaces(levels - 1) if levels else FLAT
    return {"type": "namespace", "name": "n", "description": "d", "tools": [inner]}


UNKNOWN = [
    ask("an unknown field of 3 MB", TEXT, {**SHORT, "x": "y" * 3 * MB}, may_pass=True),
    ask("an unknown field of 9 MB", TEXT, {**SHORT, "x": "y" * 9 * MB}, "the body has", status=413),
    ask("an unknown field of 60 levels", CHAT, {**HELLO, "x": nested(60)}, may_pass=True),
    ask("an unknown field of 65 levels", CHAT, {**HELLO, "x": nested(65)}, "the body is nested too deeply"),
    ask("an unknown field of 250,000 values", MESSAGES, {**CLAUDES, "x": [[]] * 120_000}, may_pass=True),
    ask("100,000 unknown fields", RESPONSES, {**SAID, **{f"x{i}": {} for i in range(100_000)}}, may_pass=True),
    ask("an unknown name of 3 MB", TEXT, {**SHORT, "y" * 3 * MB: 1}, may_pass=True),
    raw("an unknown field twice", TEXT, '{"prompt": "x", "x": 1, "x": 2}', "'x' twice"),
    raw("an unknown number", TEXT, '{"prompt": "x", "max_tokens": 1, "x": NaN}', "NaN"),
    ask("fields of other paths", TEXT, {**SHORT, "messages": USER, "input": [IMAGE] * 4000, "tools": [[]]}, may_pass=True),
    ask("a method as a field", CHAT, {**HELLO, "__class__": "x", "model_config": {}, "model_fields": {}}, may_pass=True),
]
TOOLS = [
    tools("512 of no kind", [{}] * 512, "tools["),
    tools("512 with odd types", [{"type": [{}], "name": 5}] * 512, "tools["),
    tools("a type of 900 KB", [{"type": "x" * 900_000}], may_pass=True),
    tools("513", [FLAT] * 513, "tools has 513 entries"),
    tools("512 in a namespace", [{**namespaces(0), "tools": [FLAT] * 512}], "tools has 513 entries"),
    tools("500 odd ones in a namespace", [{**namespaces(0), "tools": [{}] * 500}], may_pass=True),
    tools("namespaces in namespaces", [namespaces(12)] * 100, may_pass=True),
    tools("2 MB", [{**FLAT, "description": "x" * 2 * MB}], "tools has"),
    tools("100,000 domains", [{"type": "web_search", "filters": {"allowed_domains": [5] * 100_000}}], "tools["),
    tools(
        "an odd place",
        [{"type": "web_search", "user_location": {"type": "approximate", "city": ["x"] * 1000}}] * 100,
        may_pass=True,
    ),
    tools("filters of filters", [{"type": "file_search", "vector_store_ids": ["v"], "filters": filters(12)}], may_pass=True),
    tools("100,000 stores", [{"type": "file_search", "vector_store_ids": [5] * 100_000}], "tools["),
    tools(
        "servers",
        [{"type": "mcp", "server_label": "x", "server_url": "http://169.254.169.254/", "headers": {"a": "b"}}] * 100,
        may_pass=True,
    ),
    tools(
        "a server of any kind",
        [{"type": "mcp", "server_label": "x", "server_url": {"a": []}, "allowed_tools": [5] * 50_000}],
        "tools[",
    ),
    tools(
        "containers",
        [{"type": "code_interpreter", "container": {"type": "auto", "file_ids": ["/etc/passwd"] * 1000}}],
        may_pass=True,
    ),
    tools("all kinds", TOOLS_OF_A_RESPONSE * 20, may_pass=True),
    tools(
        "a wide function that is required",
        [{**FLAT, "strict": True, "parameters": {"type": 5}}],
        "structured_outputs",
        may_pass=True,
    ),
    ask("tools of a message, of no kind", MESSAGES, {**CLAUDES, "tools": [{}] * 512}, may_pass=True),
    ask("tools of a chat, of no kind", CHAT, {**HELLO, "tools": [{"type": {}}] * 512}, may_pass=True),
    ask(
        "a choice of 100,000 values",
        RESPONSES,
        {**SAID, "tools": [FLAT], "tool_choice": {"type": [5] * 100_000}},
        "'tool_choice' has",
    ),
]
ITEM = [
    items("4000 of kinds that nobody knows", [{"type": "x", "a": i} for i in range(4000)], "input["),
    items("4000 calls of custom tools", [CALL] * 4000, "tokens", may_pass=True),
    items("4000 odd calls of custom tools", [{"type": "custom_tool_call", "input": []}] * 300, "input["),
    items("all kinds", [one for some in ITEMS for one in some] * 100, may_pass=True),
    items("4000 odd messages", [{"role": "", "content": [{"text": 5}]}] * 4000, "input["),
    items("one of 4000 odd parts", [{"role": "user", "content": [{"text": 5}] * 4000}], "input["),
    items(
        "100,000 annotations of many kinds",
        [{"role": "assistant", "content": [{"annotations": [{"type": 5}] * 60_000}]}],
        "input[",
    ),
    items("a reasoning of 50,000 parts", [{"type": "reasoning", "summary": [{"a": 1}] * 50_000}], "parts"),
    items("a picture from a host", [{"role": "user", "content": [IMAGE]}], "'input_image' are not taken"),
    items(
        "a picture from a file", [{"role": "user", "content": [{**IMAGE, "image_url": "file:///etc/passwd"}]}], "'input_image'"
    ),
    items("a picture of an output", [{"type": "function_call_output", "call_id": "c", "output": [IMAGE]}], "'input_image'"),
    items(
        "a screenshot",
        [{"type": "computer_call_output", "call_id": "c", "output": {**IMAGE, "type": "computer_screenshot"}}],
        "_screen",
    ),
    items("a file by its id", [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}], "'input_file'"),
    items("a sound", [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AAAA"}}]}], "'input_audio'"),
    items(
        "a picture without a type", [{"role": "user", "content": [{"image_url": {"url": "http://127.0.0.1:1/"}}]}], "'image_url'"
    ),
    items("a content that is a part", [{"role": "user", "content": IMAGE}], "'input_image'"),
    items(
        "a picture in a part", [{"role": "user", "content": [{"type": "x", "content": [{"content": [IMAGE]}]}]}], "'input_image'"
    ),
    items("encrypted megabytes", [{"type": "reasoning", "summary": [], "encrypted_content": "x" * 3 * MB}], may_pass=True),
    items("an item that is a list", [[[]]] * 1000, "input["),
]
STATE = [
    ask("a template of the server", RESPONSES, {**SAID, "prompt": {"id": "x", "variables": {"a": IMAGE}}}, "'prompt' is not"),
    ask("an earlier response", RESPONSES, {**SAID, "previous_response_id": "resp_1"}, "'previous_response_id' is not"),
    ask("stored", RESPONSES, {**SAID, "store": True}, may_pass=True),
    ask("stored, in the background", RESPONSES, {**SAID, "store": True, "background": True}, "'background' is not"),
    ask("a conversation", RESPONSES, {**SAID, "conversation": {"id": "conv_1"}}, may_pass=True),
    ask("an odd background", RESPONSES, {**SAID, "background": [True]}, "'background' is not"),
    ask(
        "messages of before",
        RESPONSES,
        {**SAID, "previous_input_messages": [{"content": [IMAGE]}]},
        "'previous_input_messages' is not",
    ),
    ask(
        "all messages", RESPONSES, {**SAID, "enable_response_messages": True, "stream": True}, "'enable_response_messages' is not"
    ),
    ask(
        "servers of Anthropic's",
        MESSAGES,
        {**CLAUDES, "mcp_servers": [{"type": "url", "url": "http://127.0.0.1:1/"}]},
        may_pass=True,
    ),
    ask(
        "a document",
        MESSAGES,
        {"max_tokens": 4, "messages": [{"role": "user", "content": [{"type": "document", "title": "x"}]}]},
        "'document'",
    ),
    ask("200,000 labels", MESSAGES, {**CLAUDES, "metadata": {str(i): 1 for i in range(200_000)}}, "'metadata' has"),
    ask(
        "tool calls that are numbers",
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [5] * 100_000}, *USER]},
        "validation errors",
    ),
]
TAKEN_NOW = [*UNKNOWN, *TOOLS, *ITEM, *STATE]


def naming(url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield path and body of requests that name an address in every place where one may be named."""
    part = {"type": "input_image", "image_url": url}
    parts = [part, {"image_url": url}, {"type": "input_file", "file_url": url}, {"type": "image_url", "image_url": {"url": url}}]
    parts += [{"type": "input_video", "video_url": url}, {"type": "input_audio", "audio_url": url}, {"type": "x", "url": url}]
    for tool in (
        {"type": "mcp", "server_label": "x", "server_url": url, "require_approval": "never"},
        {"type": "mcp", "server_label": "web_search_preview", "server_url": url},
        {"type": "web_search", "filters": {"allowed_domains": [url]}},
        {"type": "code_interpreter", "container": url},
        {"type": "file_search", "vector_store_ids": [url]},
    ):
        yield RESPONSES, {**SAID, "tools": [tool]}
        yield RESPONSES, {**SAID, "tools": [tool, {**FLAT, "strict": True}], "tool_choice": "required"}
        yield MESSAGES, {**CLAUDES, "tools": [tool]}
        yield CHAT, {**HELLO, "tools": [tool]}
    for one in parts:
        yield RESPONSES, {"input": [{"role": "user", "content": [one]}]}
        yield RESPONSES, {"input": [{"type": "function_call_output", "call_id": "c", "output": [one]}]}
        yield RESPONSES, {"input": [{"type": "computer_call_output", "call_id": "c", "output": one}]}
        yield CHAT, {"messages": [{"role": "user", "content": [one]}]}
        yield MESSAGES, {"max_tokens": 1, "messages": [{"role": "user", "content": [one]}]}
        yield "/tokenize", {"messages": [{"role": "user", "content": [one]}]}
    for source in ({"type": "url", "url": url}, {"url": url}, url):
        image = {"type": "image", "source": source}
        yield MESSAGES, {"max_tokens": 1, "messages": [{"role": "user", "content": [image]}]}
        yield (
            MESSAGES,
            {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "tool_result", "content": [image]}]}]},
        )
        yield MESSAGES, {"max_tokens": 1, "messages": USER, "system": [image]}
    for path, body in ((TEXT, SHORT), (CHAT, HELLO), (RESPONSES, SAID), (MESSAGES, CLAUDES)):
        yield path, {**body, "mcp_servers": [{"type": "url", "url": url, "name": "x"}], "webhook": url, "container": url}
        yield path, {**body, "media_io_kwargs": {"image": {"url": url}}, "kv_transfer_params": {"remote_host": url}}
    yield RESPONSES, {**SAID, "metadata": {"url": url}, "conversation": url}
