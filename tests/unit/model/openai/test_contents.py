"""What of a body reaches vLLM; each refusal names the field."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from support.gates import fit_of
from support.openai_judged import JUDGED
from support.pictures import picture, png
from triton_vllm.base.errors import AdapterError
from triton_vllm.base.limits import USUAL, Limits
from triton_vllm.openai import arguments
from triton_vllm.openai.contents import CUT_AT_MOST, Content, check
from triton_vllm.openai.fields import REFUSED, ROUTES
from triton_vllm.openai.refusal import FieldError
from triton_vllm.vllm_api import BodyType, Facts

FACTS = Facts(tasks=("generate",), max_tokens=100, vocabulary=50, multimodal=False)
HELLO = [{"role": "user", "content": "Hello"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
# LiteLLM recognizes a prompt that is too long by these words.
LENGTH = "this model's maximum context length is 100 tokens"


KIND = BodyType((), frozenset())


def checked(path: str, body: dict[str, Any], limits: Limits, facts: Facts) -> Content:
    """Check a body of which vLLM takes all fields."""
    return check(ROUTES[path], KIND, body, fit_of(facts, limits, in_flight=1))


TAKEN = [
    (TEXT, {"prompt": "x", "max_tokens": 5, "n": 2, "stop": ["."], "user": "me", "metadata": {"a": "b"}, "store": True}),
    (TEXT, {"prompt": [1, 2, 49]}),
    (TEXT, {"prompt": "x", "allowed_token_ids": [1] * 5000, "logit_bias": {"1": 1, "2": -1.5}, "stop_token_ids": None}),
    (TEXT, {"prompt": "x", "metadata": {str(i): "x" for i in range(1000)}}),
    (TEXT, {"prompt": ["x"] * 8, "n": 128}),
    (TEXT, {"prompt": [1] * 100, "n": 128}),
    (TEXT, {"prompt": ["a", "b"], "use_beam_search": False, "prompt_embeds": None}),
    (CHAT, {"messages": HELLO, "tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}}),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": []}]}),
    ("/v1/responses", {"input": "x", "stream": True, "stream_options": {"include_obfuscation": False}}),
    ("/v1/responses", {"input": "x", "text": {"format": {"type": "text"}}}),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}, {"type": "reasoning"}]}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 5, "system": [{"type": "text", "text": "x"}], "tools": [{"name": "f"}]}),
    ("/v1/embeddings", {"input": ["x", "y"], "encoding_format": "base64"}),
    ("/v1/rerank", {"query": "x", "documents": ["y"], "instruction": "x" * 3000, "chat_template_kwargs": {"date_string": "x"}}),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "file_id": None}]}]}),
    ("/tokenize", {"prompt": "x"}),
    ("/detokenize", {"tokens": [1, 2]}),
]
REFUSALS = [
    (TEXT, {"prompt": "x" * 3201}, f"the prompt has 3201 characters; {LENGTH}, so it takes"),
    (TEXT, {"prompt": [50]}, "token id 50"),
    (TEXT, {"prompt": [1] * 101}, f"the prompt has 101 tokens; {LENGTH}"),
    (TEXT, {"prompt": [[1], {"a": 1}]}, "must be a text"),
    (TEXT, {"prompt": "x", "structured_outputs": "a"}, "structured_outputs must be"),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": "x"}, "must be an object"),
    ("/score", {"text_1": "x", "text_2": ["y"], "instruction": "x" * 3201}, "instruction has 3201 characters"),
    ("/score", {"instruction": "x" * 3000, "chat_template_kwargs": {"date_string": "x" * 300}}, "instruction has 3300"),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "file_id": "f"}]}]}, "'file_id'"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages must be a list"),
    (CHAT, {"messages": "x"}, "messages must be a list"),
    (CHAT, {"messages": HELLO, "tools": {"type": "function"}}, "list of objects"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "prompt_embeds", "data": "x"}]}]}, "'prompt_embeds'"),
    (CHAT, {"messages": HELLO, "documents": [{"text": "x" * 3201}]}, "characters; this model's maximum"),
    (
        "/v1/responses",
        {"input": [{"type": "computer_call_output", "output": {"type": "computer_screenshot", "image_url": "http://x"}}]},
        "'computer_screenshot'",
    ),
    ("/v1/responses", {"input": [{"content": [{"type": "input_audio", "input_audio": {"data": "AA=="}}]}]}, "'input_audio'"),
    ("/v1/responses", {"input": [{"content": [{"type": "input_video", "video": "http://x"}]}]}, "'input_video'"),
    ("/v1/responses", {"input": [{"content": {"type": "new", "later_urls": ["http://x"]}}]}, "'later_urls'"),
    (TEXT, {"prompt": "x", "stop": [["x"] * 600] * 2}, "'stop' has 1025 values or more"),
    (TEXT, {"prompt": "x", "logit_bias": {"9" * 5000: 1}}, "'logit_bias' must be an object with a number"),
    (TEXT, {"prompt": "x", "stop_token_ids": [-1]}, "stop_token_ids: token id -1 is negative"),
    ("/v1/responses", {"input": "x", "text": {"format": {"type": "grammar"}}}, "text.format"),
    (
        "/v1/messages",
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}]},
        "'image'",
    ),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "text", "source": {"url": "x"}}]}]}, "'source'"),
    ("/v1/messages", {"messages": HELLO, "system": [{"type": "document"}]}, "'document'"),
    ("/v1/responses", {"input": [{"content": [{"type": "input_text", "text": "x", "image_url": "http://x"}]}]}, "'image_url'"),
    ("/v1/responses", {"input": [{"content": [{"type": "input_text", "uuid": "x", "video_url": "http://x"}]}]}, "'uuid'"),
    (
        "/v1/responses",
        {"input": [{"content": [{"type": "input_text", "text": ""}] * 2049}] * 2},
        "input[1].content have 4098 parts",
    ),
    (
        "/v1/messages",
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "base64", "data": "AA=="}}]}]},
        "Messages of chat completions may have pictures",
    ),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'image'"),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"documents": "x" * 3201}}, "characters; this model's maximum"),
    (
        CHAT,
        {"messages": HELLO, "chat_template_kwargs": {"documents": [""] * 300_000}},
        "has 1200015 bytes",
    ),
    (TEXT, {"prompt": "x", "response_format": "[" * 100_000}, "must be an object"),
    ("/v1/rerank", {"query": "x", "documents": [{"content": []}]}, "must be a text"),
]


@pytest.mark.parametrize(("path", "body"), TAKEN, ids=lambda value: str(value)[:60])
def test_ordinary_requests_pass(path, body):
    """With the fields that clients send, and defaults of those that are refused."""
    checked(path, {"model": "m", **body}, USUAL, FACTS)


def test_tokens_of_a_text_that_is_cut_are_not_counted_unless_it_is_long():
    """A text above the model's length may then be sent."""
    facts = replace(FACTS, max_tokens=10_000)
    texts = ("x" * CUT_AT_MOST, "x" * (CUT_AT_MOST + 1))
    for path, name in ((TEXT, "prompt"), ("/v1/embeddings", "input"), ("/v1/rerank", "query")):
        body = {name: [*texts]}
        assert checked(path, body, USUAL, facts).texts == texts
        assert checked(path, {**body, "truncate_prompt_tokens": None}, USUAL, facts).texts == texts
        assert checked(path, {**body, "truncate_prompt_tokens": -1}, USUAL, facts).texts == texts[1:]


@pytest.mark.parametrize(("path", "body", "text"), REFUSALS, ids=lambda value: str(value)[:60])
def test_the_others_are_refused(path, body, text):
    """Before a tokenizer, a file or a network sees them."""
    with pytest.raises(AdapterError, match=r"\w") as raised:
        checked(path, {"model": "m", **body}, USUAL, FACTS)
    assert text in str(raised.value)


DEEP = "[" * 100_000
NO_TYPES: list[Any] = [[], {}, "json_schema", "function_call_output", "custom", "function"]
NO_FORMATS: list[Any] = [[], {"type": []}, {"type": "json_schema", "schema": 1}]
NO_CONSTRAINTS: list[Any] = [[], {}, [{}], DEEP]
NO_CONTENTS: list[Any] = [{}, 1, [1], [{"type": []}], [{"type": "text", "content": [{"type": {}}]}]]
NO_URLS: list[Any] = [[], {"url": []}, "http://[", "data:", 1]
ODD: list[Any] = [
    *(None, True, 1, -1, 1.5, "", "x", DEEP, [], [[]], [{}], [1], [-1], [1, 2.5], [None], ["x", 1], {}, {"a": []}),
    *({"type": kind} for kind in NO_TYPES),
    *([{"type": kind}] for kind in NO_TYPES),
    *({"format": form} for form in NO_FORMATS),
    *({name: value} for name in ("regex", "grammar", "choice", "json") for value in NO_CONSTRAINTS),
    *([{"role": "user", "content": content}] for content in NO_CONTENTS),
    *([{"role": "user", "content": [{"image_url": url}]}] for url in NO_URLS),
    {"type": "json_schema", "schema": {"enum": 1, "maxLength": 1e300, "pattern": []}},
    {"type": "json_schema", "json_schema": []},
    [{"role": [], "content": "x"}],
]


@pytest.mark.parametrize("facts", [FACTS, replace(FACTS, multimodal=True), Facts()], ids=["text", "pictures", "unknown"])
def test_odd_values_pass_or_are_refused(facts):
    """In every field of every path: vLLM's classes refuse what passes, and nothing else is raised here."""
    for route in ROUTES.values():
        for name in [*JUDGED, "unknown", *REFUSED, *route.refused]:
            for value in ODD:
                with suppress(AdapterError):
                    check(route, KIND, {name: value}, fit_of(facts, in_flight=1))


@pytest.mark.parametrize("path", [path for path, route in ROUTES.items() if route.method == "POST"])
def test_refused_fields_are_named_with_the_reason(path):
    """Those of every path, and its own; a default is none."""
    route = ROUTES[path]
    for name, reason in {**REFUSED, **route.refused}.items():
        with pytest.raises(FieldError, match=f"^'{name}' is not taken from a request: {reason}$"):
            checked(path, {name: "x"}, USUAL, FACTS)
        checked(path, {name: None}, USUAL, FACTS)
        checked(path, {name: False}, USUAL, FACTS)


def test_what_is_harmless_on_one_path_may_be_refused_on_another():
    """A prompt is a text here, and the name of a template there."""
    checked(TEXT, {"prompt": "x"}, USUAL, FACTS)
    with pytest.raises(AdapterError, match="it names a template"):
        checked("/v1/responses", {"prompt": "x"}, USUAL, FACTS)


TOOLS = [
    *({"type": kind} for kind in ("web_search", "web_search_preview", "local_shell", "shell", "apply_patch", "computer")),
    {"type": "namespace", "name": "n", "description": "d", "tools": [{"type": "function", "name": "f", "parameters": {}}]},
    {"type": "mcp", "server_label": "x", "server_url": "http://127.0.0.1:1"},
    {"type": "code_interpreter", "container": {"type": "auto", "file_ids": ["f"]}},
    {"type": "file_search", "vector_store_ids": ["v"]},
    {"type": "web_search_20250305", "name": "web_search"},
    {"type": "of a newer vLLM"},
]


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages"])
def test_tools_of_all_kinds_are_taken_because_no_server_runs_them(path):
    """Whoever allows `tool_server` has to look at the tools again: it runs programs, and reads what they name."""
    checked(path, {"tools": TOOLS}, USUAL, FACTS)
    assert "tool_server" in arguments.OURS


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_tools_that_messages_add_count_with_the_others(path):
    """Anthropic's `tool_addition`; vLLM makes one list of all."""
    tool = {"name": "f", "input_schema": {"type": "object"}}
    part = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": tool}}
    named = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "f"}}

    def check(*parts, tools):
        body = {"messages": [*HELLO, {"role": "system", "content": [*parts]}], "tools": [tool] * tools}
        checked(path, body, USUAL, replace(FACTS, max_tokens=100_000))

    check(*[part] * 200, *[named] * 600, tools=312)
    with pytest.raises(AdapterError, match="tools has 513 entries"):
        check(*[part] * 201, tools=312)
    tool = {"name": "f", "input_schema": {"x" * USUAL.max_parameter_bytes: 1}}
    part["tool"]["definition"] = tool  # type: ignore[index]
    with pytest.raises(AdapterError, match=r"tools has .* bytes"):
        check(part, tools=0)


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages"])
def test_lists_of_many_kinds_are_looked_at_later(path):
    """Only a response has such lists."""
    body = {"input": [{}], "tools": [{}], "messages": HELLO}
    lists = checked(path, body, USUAL, FACTS).lists
    assert [one.name for one in lists] == (["input", "tools"] if path == "/v1/responses" else [])
    assert checked(path, {"input": "x", "messages": HELLO}, USUAL, FACTS).lists == ()


def test_pictures_are_checked_and_their_length_is_no_text():
    """A picture may be longer than any text that the model takes."""
    seeing = replace(FACTS, multimodal=True)
    url = f"data:image/png;base64,{picture(png(64, 64) + bytes(3201))}"
    body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}
    assert checked(CHAT, body, USUAL, seeing).messages == tuple(body["messages"])
    with pytest.raises(AdapterError, match="takes texts only"):
        checked(CHAT, body, USUAL, FACTS)
    assert checked(TEXT, {"prompt": [10**6]}, USUAL, seeing)  # such ids are placeholders
    with pytest.raises(AdapterError, match="token id -1 is negative"):
        checked(TEXT, {"prompt": [1, -1]}, USUAL, seeing)
    url = "http://169.254.169.254/latest/meta-data"
    body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}
    with pytest.raises(AdapterError, match="nothing is fetched from there"):
        checked(CHAT, body, USUAL, seeing)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}),
        (CHAT, {"structured_outputs": {"json": SCHEMA}}),
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}),
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    ],
)
def test_a_constraint_of_every_protocol_is_tried(path, body):
    """Under the same name and with the same text, so that it is tried once."""
    constraint = checked(path, body, USUAL, FACTS).constraint
    assert constraint is not None
    assert (constraint.kind, constraint.text) == ("json", '{"type": "object", "properties": {"a": {"type": "string"}}}')
