"""Hostile HTTP requests for the OpenAI port, as data.

They are the corpus of Triton's requests in this protocol's words, and those that only the port can get.
They are for a model of texts with 256 positions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hostile.corpus import CORPUS, PROMPT, Case, data_url, nested
from hostile.openai_items import TAKEN
from support.pictures import png

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
JSON_TYPE = {"Content-Type": "application/json"}
MB = 1_000_000
ANSWERED = 200


@dataclass(frozen=True)
class Shot:
    """One hostile request.

    Attributes:
        name: what it tries.
        path: where it goes.
        make: makes its body; some have 50 MB.
        says: a part of the refusal. Empty for any that names a field of the body, or the body.
        status: the status. 0 for any from 400 to 499.
        may_pass: whether it may be answered, as some version of vLLM does.
        headers: the headers.
    """

    name: str
    path: str
    make: Callable[[], bytes]
    says: str = ""
    status: int = 0
    may_pass: bool = False
    headers: Mapping[str, str] = field(default_factory=lambda: JSON_TYPE)


IGNORED = {
    "an unknown name of 1 MB", "100,000 names", "guided_choice of 100,000", "guided_regex that explodes", "field extra_args",
    "field data_parallel_rank",
}  # fmt: skip
"""Names of requests of the corpus whose field vLLM's server does not have."""


def translated(case: Case) -> Shot:
    """Return a request of the corpus as one for the port."""
    tensors = case.make() if not case.heavy else {}
    # The heavy ones are made when they are sent. Their names say what they have.
    chats = "messages" in tensors or "message" in case.name
    path = CHAT if chats or "image" in tensors else TEXT
    if "embedding_request" in tensors:
        path = "/v1/embeddings" if case.name.startswith("embed") else "/v1/score"
    may_pass = not case.refused_early or case.name in IGNORED
    return Shot(case.name, path, lambda: as_body(case.make()), may_pass=may_pass)


def as_body(tensors: Mapping[str, Any]) -> bytes:
    """Return the body with what tensors ask for."""
    fields: dict[str, str] = {"model": '"vllm"'}
    if "image" in tensors:
        pictures = tensors["image"] if isinstance(tensors["image"], list) else [tensors["image"]]
        parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{one}"}} for one in pictures]
        fields["messages"] = json.dumps([{"role": "user", "content": [{"type": "text", "text": PROMPT}, *parts]}])
    elif "text_input" in tensors:
        fields["prompt"] = json.dumps(tensors["text_input"])
    if "prompt_token_ids" in tensors:
        fields["prompt"] = json.dumps(tensors["prompt_token_ids"])
    fields |= {name: text for name, text in tensors.items() if name in ("messages", "tools", "chat_template_kwargs")}
    if "operator_request" in tensors:
        fields["operator_request"] = json.dumps(tensors["operator_request"])
    more = tensors.get("sampling_parameters") or tensors.get("embedding_request") or "{}"
    # A text that is no object takes the place of the whole body.
    if not more.startswith("{"):
        return str(more).encode()
    own = ", ".join(f"{json.dumps(name)}: {text}" for name, text in fields.items())
    return ("{" + own + ("}" if more == "{}" else ", " + more[1:])).encode()


def ask(name: str, path: str, body: Mapping[str, Any], says: str = "", **more: Any) -> Shot:
    """Return a request with a body of JSON."""
    return Shot(name, path, lambda: json.dumps({"model": "vllm", **body}).encode(), says, **more)


def raw(name: str, path: str, body: str | bytes, says: str = "", **more: Any) -> Shot:
    """Return a request with this very body."""
    data = body if isinstance(body, bytes) else body.encode()
    return Shot(name, path, lambda: data, says, **more)


USER = [{"role": "user", "content": "Hello!"}]
HELLO: dict[str, Any] = {"messages": USER, "max_tokens": 4}
SHORT: dict[str, Any] = {"prompt": "x", "max_tokens": 4}
STREAMED: dict[str, Any] = {"input": "x", "stream": True, "max_output_tokens": 4}
LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
WIDE = {"type": "object", "properties": {f"a{i}": {"type": "string", "maxLength": 1000} for i in range(64)}}


def tool(parameters: Any) -> dict[str, Any]:
    """Return a tool with these parameters."""
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def called(name: str, tools: Any, says: str = "", choice: Any = "required", **more: Any) -> Shot:
    """Return a chat that must call a tool: vLLM makes a constraint of the tools."""
    return ask(name, CHAT, {**HELLO, "tools": tools, "tool_choice": choice}, says, **more)


FROM_THE_ISSUE = [
    ask("padded to 10^8", CHAT, {**HELLO, "chat_template_kwargs": {"max_length": 1e8, "padding": "max_length"}}, "max_length"),
    ask("50 MB to cut", TEXT, {"prompt": "x" * 50 * MB, "truncate_prompt_tokens": 10}, "the body has", status=413),
    ask("a text of 3.9 MB to tokenize", "/tokenize", {"prompt": "x " * 1_950_000}, "the prompt has 3900000 characters"),
    ask("a chat of 3.9 MB to tokenize", "/tokenize", {"messages": [{"role": "user", "content": "x " * 1_950_000}]}, "characters"),
    ask("nothing to see in a message", MESSAGES, {"messages": [{"role": "user", "content": "x " * 1_950_000}]}, "characters"),
    ask("a body of 70 MB", TEXT, {"prompt": "x", "user": "x" * 70 * MB}, "the body has more than", status=413),
]
PLACES = ("file:///etc/passwd", "http://169.254.169.254/latest/meta-data", "http://127.0.0.1:1/", "http://[::1]/", "HTTP://x/")
PICTURES = [
    ask(
        f"{kind} from {place}",
        path,
        {"messages": [{"role": "user", "content": [{"type": kind, kind: {"url": place}}]}]},
        "nothing is fetched from there",
    )
    for path in (CHAT, "/tokenize")
    for kind in ("image_url", "video_url", "audio_url")
    for place in PLACES
]
PICTURES += [
    ask(
        "a picture in a response",
        RESPONSES,
        {**STREAMED, "input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://127.0.0.1:1/"}]}]},
        "'input_image' are not taken",
    ),
    ask(
        "a file in a response",
        RESPONSES,
        {**STREAMED, "input": [{"role": "user", "content": [{"type": "input_file", "file_url": "http://127.0.0.1:1/"}]}]},
        "'input_file' are not taken",
    ),
    ask(
        "a picture in a message",
        MESSAGES,
        {
            "max_tokens": 1,
            "messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x/"}}]}],
        },
        "'image' are not taken",
    ),
    ask(
        "17 large pictures",
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": data_url(png(30_000, 30_000))}] * 17}]},
        "30000 x 30000 has",
    ),
]
STREAMED_RESPONSES = [
    ask(f"a streamed response: {name}", RESPONSES, {**STREAMED, **fields}, says)
    for name, fields, says in (
        ("a wrong regex", {"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ("a deep regex", {"structured_outputs": {"regex": "(" * 40 + ")" * 40}}, "structured_outputs.regex"),
        (
            "a wrong schema",
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 5}}}},
            "structured_outputs.json",
        ),
        ("a bias beyond", {"logit_bias": {"200000": 1}}, "logit_bias"),
        ("a temperature of -1", {"temperature": -1}, "temperature"),
        ("a top_p of 5", {"top_p": 5}, "top_p"),
        ("a priority", {"priority": 2**70}, "the body holds an integer"),
        ("log probabilities", {"top_logprobs": 500, "include": ["message.output_text.logprobs"]}, "logprobs"),
        ("stored", {"previous_response_id": "resp_1"}, "'previous_response_id' is not taken"),
        ("a prompt", {"prompt": {"id": "x"}}, "'prompt'"),
        ("18 odd items", {"input": [{"role": 5}] * 18}, "input[16]"),
        ("4096 odd items", {"input": [{"role": 5}] * 4096}, "input[16]"),
        ("512 odd calls", {"input": [{"type": "function_call"}] * 512}, "input[16]"),
        ("an item of 4000 odd parts", {"input": [{"role": "user", "content": [{"type": "x"}] * 4000}]}, "input[0]"),
        (
            "100,000 annotations",
            {"input": [{**TAKEN[4], "content": [{"type": "output_text", "text": "a", "annotations": [5] * 100_000}]}]},
            "input[0]",
        ),
        ("4097 items", {"input": [TAKEN[0]] * 4097}, "input has 4097 entries"),
        ("200,000 includes", {"include": ["x"] * 200_000}, "'include' has"),
        ("100,000 labels", {"metadata": {str(i): 1 for i in range(100_000)}}, "'metadata' has"),
    )
]
AMOUNTS = [
    ask("n of 129", TEXT, {**SHORT, "n": 129}, "n must be smaller"),
    ask("n of 2^31", TEXT, {**SHORT, "n": 2**31}, "the request asks for 2147483648 completions"),
    ask(
        "n of 128 with 20 log probabilities",
        TEXT,
        {**SHORT, "n": 128, "logprobs": 20, "max_tokens": 200, "prompt": ["x"] * 3, "stream": True},
        "are for all prompts",
    ),
    ask(
        "a chat of 128 answers with 20 log probabilities",
        CHAT,
        {**HELLO, "n": 128, "logprobs": True, "top_logprobs": 20, "max_tokens": 150},
        "without stream, 384000 values",
    ),
    ask("256 prompts with n of 128", TEXT, {"prompt": ["x"] * 256, "n": 128, "max_tokens": 1}, "completions or inputs"),
    ask("257 prompts", TEXT, {"prompt": ["x"] * 257, "max_tokens": 1}, "prompt has 257 inputs"),
    ask("log probabilities of all", TEXT, {**SHORT, "logprobs": 10**6}, "logprobs"),
    ask("the prompt's log probabilities of all", TEXT, {**SHORT, "prompt_logprobs": -1}, "prompt_logprobs"),
    ask("20,000 top_logprobs", CHAT, {**HELLO, "logprobs": True, "top_logprobs": 20_000}, "logprobs"),
    ask("100,000 biases", TEXT, {**SHORT, "logit_bias": {str(i): 1 for i in range(100_000)}}, "'logit_bias' has 100000 entries"),
    ask("biases that are texts", TEXT, {**SHORT, "logit_bias": {str(i): "x" for i in range(300)}}, "'logit_bias'"),
    ask("200,000 stop strings", TEXT, {**SHORT, "stop": ["x"] * 200_000}, "'stop' has"),
    ask("65 stop strings", TEXT, {**SHORT, "stop": ["x"] * 65}, "stop"),
    ask("65 stop sequences", MESSAGES, {**HELLO, "stop_sequences": ["x"] * 65}, "stop"),
    ask("a stop string of 1 MB", TEXT, {**SHORT, "stop": "y" * MB}, "stop"),
    ask("200,000 allowed tokens", TEXT, {**SHORT, "allowed_token_ids": [1] * 200_000, "n": 20}, may_pass=True),
    ask("allowed tokens that are texts", TEXT, {**SHORT, "allowed_token_ids": ["x"] * 200_000}, "'allowed_token_ids' must be"),
    ask("200,000 bad words", TEXT, {**SHORT, "bad_words": ["x"] * 200_000}, "'bad_words' has"),
    ask("a model's name of 7 MB", TEXT, {**SHORT, "model": "x" * 7 * MB}, "'model' has"),
    ask("a salt of 7 MB", TEXT, {**SHORT, "cache_salt": "x" * 7 * MB}, "cache_salt"),
    ask("300,000 values", TEXT, {**SHORT, "user": [1] * 300_000}, "the body has"),
    ask("4,000 parts without a type", CHAT, {"messages": [{"role": "user", "content": [{"x": 1}] * 4000}]}, may_pass=True),
    ask("beams", TEXT, {**SHORT, "use_beam_search": True, "n": 50}, "'use_beam_search' is not taken"),
    ask("two million ids to read", "/detokenize", {"tokens": [1] * 2_000_000}, "the body has"),
    ask("ids beyond the vocabulary", "/detokenize", {"tokens": [10**9]}, "token id 1000000000"),
    ask("ids below zero", "/detokenize", {"tokens": [-1]}, "tokens: token id -1 is negative"),
    ask(
        "a repetition of 10^9",
        TEXT,
        {**SHORT, "repetition_detection": {"max_pattern_size": 10**9, "min_count": 2}},
        "repetition_detection",
    ),
    ask(
        "a stream's interval of 10^9", TEXT, {**SHORT, "stream": True, "stream_interval": 10**9}, "stream_interval", may_pass=True
    ),
    ask("a prompt to cut to 2^62", TEXT, {**SHORT, "truncate_prompt_tokens": 2**62}, "truncate_prompt_tokens"),
]
CONSTRAINTS = [
    ask(f"a constraint: {name}", CHAT, {**HELLO, **fields}, says, **more)
    for name, fields, says, more in (
        (
            "a schema in a loop",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": LOOP}}},
            "",
            {"may_pass": True},
        ),
        (
            "a pattern of letters",
            {"structured_outputs": {"json": {"type": "string", "pattern": r"\p{L}+"}}},
            "",
            {"may_pass": True},
        ),
        ("letters", {"structured_outputs": {"regex": r"\p{L}+"}}, "", {"may_pass": True}),
        ("a regex that explodes", {"structured_outputs": {"regex": "((a{100}){100}){100}"}}, "repetitions written out", {}),
        ("a grammar in a loop", {"structured_outputs": {"grammar": "root ::= root"}}, "", {"may_pass": True}),
        ("64 optional characters", {"structured_outputs": {"regex": ".?" * 64}}, "", {"may_pass": True}),
        ("a schema of 2^70", {"structured_outputs": {"json": '{"enum": [1180591620717411303424]}'}}, "more than 64 bits", {}),
        ("two of them", {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured", {}),
        ("another backend", {"structured_outputs": {"regex": "a", "_backend": "x"}}, "structured_outputs must be", {}),
        ("guided_regex", {"guided_regex": "((a{100}){100}){100}"}, "", {"may_pass": True}),
        ("a format that is none", {"response_format": {"type": "x"}}, "response_format", {}),
        (
            "a format of a structural tag",
            {"response_format": {"type": "structural_tag", "structures": [], "triggers": []}},
            "",
            {"may_pass": True},
        ),
    )
]
# Alone, those of a wrong type and of letters are refused by name. Next to other requests they were also answered (vLLM 0.32).
CONSTRAINTS += [
    called("a tool in a loop", [tool(LOOP)], may_pass=True),
    called("a tool with a regex that explodes", [tool({"type": "string", "pattern": "((a{100}){100}){100}"})], may_pass=True),
    called("a tool of letters", [tool({"type": "string", "pattern": r"\p{L}+"})], "structured_outputs", may_pass=True),
    called("a tool of a wrong type", [tool({"type": 5})], "structured_outputs", may_pass=True),
    called("a tool that is a text", ["x"], "tools must be"),
    called("a tool without a name", [{"type": "function", "function": {}}], "tools"),
    called("512 tools of 64 fields", [tool(WIDE)] * 512, "tools has"),
    called("513 tools", [tool({})] * 513, "tools has 513 entries"),
    called("no tools", [], "tool"),
    called("a choice that is not there", [tool({})], "tool", {"type": "function", "function": {"name": "g"}}),
]
NOT_JSON = [
    raw("deep JSON", TEXT, '{"prompt": ' + "[" * 1_000_000 + "]" * 1_000_000 + "}", "the body"),
    ask("65 levels", TEXT, {**SHORT, "user": nested(65)}, "the body is nested too deeply"),
    raw("not a number", TEXT, '{"prompt": "x", "temperature": NaN}', "NaN"),
    raw("infinity", TEXT, '{"prompt": "x", "temperature": -Infinity}', "Infinity"),
    raw("1e400", TEXT, '{"prompt": "x", "temperature": 1e400}', "1e400"),
    raw("a number of 5,000 digits", TEXT, '{"prompt": "x", "max_tokens": 1' + "0" * 5000 + "}", "the body"),
    raw("2^70", TEXT, '{"prompt": "x", "max_tokens": 1180591620717411303424}', "the body holds an integer"),
    raw("a name twice", TEXT, '{"prompt": "x", "max_tokens": 1, "max_tokens": 100000}', "'max_tokens' twice"),
    raw("a name twice, inside", CHAT, '{"messages": [{"role": "user", "role": "user", "content": "x"}]}', "'role' twice"),
    raw("no UTF-8", TEXT, b'{"prompt": "\xff\xfe"}', "the body is not UTF-8"),
    raw("half a character", TEXT, '{"prompt": "\\ud800"}', "a lone surrogate"),
    raw("a mark at the beginning", TEXT, b'\xef\xbb\xbf{"prompt": "x"}', "the body is not valid JSON"),
    raw("UTF-16", TEXT, '{"prompt": "x"}'.encode("utf-16"), "the body is not UTF-8"),
    raw("a list", TEXT, "[]", "the body must be a JSON object"),
    raw("nothing", TEXT, "", "the body is not valid JSON"),
    raw("a half", TEXT, '{"prompt": "x', "the body is not valid JSON"),
    raw("a NUL", TEXT, '{"prompt": "x"}\0', "the body is not valid JSON"),
    raw("nothing else than brackets", CHAT, "[" * 500_000, "the body"),
    ask("another type of content", TEXT, SHORT, "", headers={"Content-Type": "text/plain"}),
    ask("a form", TEXT, SHORT, "", headers={"Content-Type": "multipart/form-data; boundary=x"}),
    ask("gzip", TEXT, SHORT, "Content-Encoding", headers={**JSON_TYPE, "Content-Encoding": "gzip"}, status=415),
]
OF_THE_PORT = [
    *FROM_THE_ISSUE,
    *PICTURES,
    *STREAMED_RESPONSES,
    *AMOUNTS,
    *CONSTRAINTS,
    *NOT_JSON,
]
"""What only this protocol has, or says in another way."""
SHOTS = [*OF_THE_PORT, *map(translated, CORPUS)]


@dataclass(frozen=True)
class Bytes:
    """What is written to a socket.

    Attributes:
        name: what it tries.
        sent: the bytes.
        statuses: the answers' statuses that are right. Empty if it is no HTTP request that is complete.
        shuts: whether the client then says that it sends no more.
    """

    name: str
    sent: bytes
    statuses: frozenset[int] = frozenset()
    shuts: bool = False


def head(method: str, path: str, *headers: str) -> bytes:
    """Return the head of a request."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *headers, "", ""]).encode()


_BODY = json.dumps({"model": "vllm", **SHORT}).encode()
_LENGTH = f"Content-Length: {len(_BODY)}"
BYTES = [
    Bytes("no HTTP", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 50, frozenset({400})),
    Bytes("a line without an end", b"GET /" + b"a" * 200_000, frozenset({400})),
    Bytes(
        "headers of 10 MB",
        b"GET /health HTTP/1.1\r\n" + b"".join(b"x-%d: %s\r\n" % (i, b"a" * 1000) for i in range(10_000)),
        frozenset({400}),
    ),
    Bytes("one header of 1 MB", head("GET", "/health", "x: " + "a" * MB), frozenset({400})),
    Bytes("200,000 short headers", b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 200_000 + b"\r\n", frozenset({400})),
    Bytes("1,000 requests at once", head("GET", "/health") * 1000, frozenset({200, 400})),
    Bytes(
        "16 requests at once",
        (head("POST", TEXT, _LENGTH) + _BODY) * 16 + head("GET", "/health", "Connection: close"),
        frozenset({200}),
    ),
    Bytes("two lengths", head("POST", TEXT, _LENGTH, "Content-Length: 5") + _BODY, frozenset({400})),
    Bytes("a length and chunks", head("POST", TEXT, _LENGTH, "Transfer-Encoding: chunked") + b"0\r\n\r\n", frozenset({400})),
    Bytes("a length below zero", head("POST", TEXT, "Content-Length: -5") + _BODY, frozenset({400})),
    Bytes("a length of 10^18", head("POST", TEXT, "Content-Length: 1000000000000000000"), frozenset({413})),
    Bytes("a length of 10^30", head("POST", TEXT, "Content-Length: 1" + "0" * 30), frozenset({400})),
    Bytes("a wrong chunk", head("POST", TEXT, "Transfer-Encoding: chunked") + b"zz\r\nabc", frozenset({400})),
    Bytes(
        "chunks of one byte",
        head("POST", TEXT, "Transfer-Encoding: chunked", "Connection: close")
        + b"".join(b"1\r\n%c\r\n" % c for c in _BODY)
        + b"0\r\n\r\n",
        frozenset({200}),
    ),
    Bytes(
        "100,000 chunks of one byte", head("POST", TEXT, "Transfer-Encoding: chunked") + b"1\r\n \r\n" * 100_000, frozenset({400})
    ),
    Bytes(
        "an upgrade",
        head("GET", "/v1/realtime", "Connection: upgrade, close", "Upgrade: websocket", "Sec-WebSocket-Version: 13"),
        frozenset({404}),
    ),
    Bytes("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", frozenset({400})),
    Bytes("HTTP/9.9", b"GET /health HTTP/9.9\r\n\r\n", frozenset({400})),
    Bytes("a method that is none", b"FETCH /health HTTP/1.1\r\n\r\n", frozenset({400})),
    Bytes("a proxy's request", b"GET http://169.254.169.254/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", frozenset({404})),
    Bytes("a tunnel", b"CONNECT 169.254.169.254:80 HTTP/1.1\r\nHost: x\r\n\r\n", frozenset({400, 404})),
    Bytes("a folder above", head("GET", "/v1/../../etc/passwd", "Connection: close"), frozenset({404})),
    Bytes("half a request", head("POST", TEXT, _LENGTH) + _BODY[:5], shuts=True),
    Bytes("half a head", b"POST /v1/completions HTTP/1.1\r\nHo", shuts=True),
    Bytes("a request, and no more", head("POST", TEXT, _LENGTH) + _BODY, shuts=True),
]
"""What no HTTP library would send."""
