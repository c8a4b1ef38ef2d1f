"""Hostile requests as data: a name, the tensors, and the refusal that each must get, or that it must be answered.

From the attacks on the real server and from the public advisories for vLLM. They are for a model of texts with 256 positions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from support.pictures import jpeg, picture, png, webp

PROMPT = "The capital of France is"
ANSWER = "(an answer)"
ANY = "(an answer or a refusal)"
"""What vLLM decides, each version in its own way."""


@dataclass(frozen=True)
class Case:
    """One hostile request.

    Attributes:
        name: what it tries.
        make: makes its tensors; some have 50 MB.
        expected: a part of the refusal, `ANSWER` or `ANY`.
        early: if refused, then without vLLM.
        heavy: it takes seconds to make and to send.
    """

    name: str
    make: Callable[..., Mapping[str, Any]]
    expected: str
    early: bool = True
    heavy: bool = False

    @property
    def refused_early(self) -> bool:
        """Whether admission refuses it."""
        return self.early and self.expected not in (ANSWER, ANY)


def sampled(name: str, parameters: Mapping[str, Any] | str, expected: str, **more: Any) -> Case:
    """Return a case of sampling parameters."""
    text = parameters if isinstance(parameters, str) else json.dumps(parameters)
    return Case(name, lambda: {"text_input": PROMPT, "sampling_parameters": text}, expected, **more)


def constrained(name: str, field: str, value: Any, expected: str, **more: Any) -> Case:
    """Return a case of structured outputs."""
    return sampled(name, {"structured_outputs": {field: value}, "max_tokens": 8}, expected, **more)


def chat(name: str, messages: Any, expected: str, **inputs: Any) -> Case:
    """Return a case of a conversation; its further inputs are JSON values."""
    return Case(name, lambda: {"messages": json.dumps(messages), **{k: json.dumps(v) for k, v in inputs.items()}}, expected)


def said(name: str, part: Any, expected: str) -> Case:
    """Return a case of one part of a message's content."""
    return chat(name, [{"role": "user", "content": [part]}], expected)


def shown(name: str, image: Any, expected: str) -> Case:
    """Return a case of pictures beside a prompt."""
    return Case(name, lambda: {"text_input": PROMPT, "image": image}, expected)


def data_url(data: bytes, kind: str = "image/png") -> dict[str, str]:
    """Return what holds a file in a message."""
    return {"url": f"data:{kind};base64,{picture(data)}"}


def nested(levels: int, inner: Any = 1) -> Any:
    """Return lists within lists."""
    for _ in range(levels):
        inner = [inner]
    return inner


SIZES = [
    Case("prompt of 10 MB", lambda: {"text_input": "word " * 2_000_000}, "text_input has 10000000 bytes", heavy=True),
    Case("prompt of 10 MB without spaces", lambda: {"text_input": "x" * 10_000_000}, "text_input has 10000000 bytes", heavy=True),
    Case("prompt of 3 MB", lambda: {"text_input": "a b " * 750_000}, "the prompt has 3000000 characters; this", heavy=True),
    Case("prompt a little too long", lambda: {"text_input": "word " * 2000}, "the prompt has 10000 characters; this"),
    Case("prompt too long once tokenized", lambda: {"text_input": "word " * 1000}, "maximum", early=False),
    Case("emoji", lambda: {"text_input": "\N{PILE OF POO}" * 2500}, "", early=False),
    Case("half a million token ids", lambda: {"prompt_token_ids": [1] * 500_000}, "this model's maximum context", heavy=True),
    Case(
        "two million token ids", lambda: {"prompt_token_ids": [1] * 2_000_000}, "prompt_token_ids has 8000000 bytes", heavy=True
    ),
    Case("257 token ids", lambda: {"prompt_token_ids": [5] * 257}, "the prompt has 257 tokens; this"),
    Case("token id 2^31 - 1", lambda: {"prompt_token_ids": [2**31 - 1]}, "token id 2147483647 is not in the model's vocabulary"),
    Case("token id 2^32 + 5", lambda: {"prompt_token_ids": [2**32 + 5]}, "token id 4294967301 is not in the model's vocabulary"),
    Case("token id -2^31", lambda: {"prompt_token_ids": [-(2**31)]}, "non-negative token ids"),
    sampled("parameters of 50 MB", '{"' + "x" * 50_000_000 + '": 1}', "sampling_parameters has 50000007 bytes", heavy=True),
    sampled("an unknown name of 1 MB", '{"' + "x" * 1_000_000 + '": 1}', "unknown sampling parameter 'xxx"),
    sampled("a value of 1 MB", {"max_tokens": "9" * 1_000_000}, "must be an integer"),
    sampled("a number of 4,000 digits", '{"max_tokens": ' + "9" * 4000 + "}", "must be an integer of 64 bits"),
    sampled("a number of 5,000 digits", '{"max_tokens": ' + "9" * 5000 + "}", "sampling_parameters is not valid JSON"),
    sampled("100,000 names", json.dumps({f"a{i}": 1 for i in range(50_000)}), "unknown sampling parameter"),
    sampled("lists within lists", {"stop": nested(65)}, "nested too deeply: at most 64"),
    sampled("900 lists within lists", {"stop": nested(900)}, "nested too deeply"),
    sampled("100,000 brackets", "[" * 100_000, "sampling_parameters is nested too deeply"),
    sampled("half a character", '{"stop": ["\\ud800"]}', "a lone surrogate"),
    sampled("NUL in a stop string", {"stop": ["\0"], "max_tokens": 4}, ANSWER, early=False),
]
AMOUNTS = [
    sampled("n of 16384", {"n": 16384, "max_tokens": 400}, "n must be smaller, it is 16384"),
    sampled("n of 513", {"n": 513, "temperature": 1}, "n must be smaller, it is 513"),
    sampled("n of 2^63", {"n": 2**63}, "must be an integer of 64 bits"),
    sampled("n times max_tokens", {"n": 64, "max_tokens": 4000, "temperature": 1}, "n times max_tokens are 256000 tokens"),
    sampled("max_tokens of 10^9", {"max_tokens": 10**9, "temperature": 0}, ANSWER, early=False),
    sampled("max_tokens of 2^62", {"max_tokens": 2**62, "temperature": 0}, ANY, early=False),
    sampled("min_tokens of 10^9, max_tokens null", {"min_tokens": 10**9, "max_tokens": None}, "min_tokens must be", early=False),
    sampled("min_tokens beyond max_tokens", {"min_tokens": 9, "max_tokens": 3}, "min_tokens must be", early=False),
    sampled("min_tokens of 2^62", {"min_tokens": 2**62, "max_tokens": 2**62}, ANY, early=False),
    sampled("min_tokens beyond the model's length", {"min_tokens": 300, "max_tokens": 400}, ANSWER, early=False),
    sampled("logprobs of all", {"logprobs": -1}, "logprobs must be at most 128"),
    sampled("prompt_logprobs of all", {"prompt_logprobs": -1}, "prompt_logprobs must be at most 128"),
    sampled("logprobs of 5000", {"logprobs": 5000}, "logprobs must be smaller, it is 5000"),
    sampled("prompt_logprobs of 10^12", {"prompt_logprobs": 10**12}, "prompt_logprobs must be smaller"),
    sampled("65 stop strings", {"stop": ["x"] * 65}, "'stop' has 65 strings"),
    sampled("a stop string of 100,000 characters", {"stop": "y" * 100_000}, "'stop' has a string of 100000 characters"),
    sampled("10,000 bad words", {"bad_words": ["x"] * 10_000}, "'bad_words' has 10000 strings"),
    sampled("a bad word of 100,000 characters", {"bad_words": ["y " * 50_000]}, "'bad_words' has a string of 100000 characters"),
    sampled("an empty stop string", {"stop": [""]}, "stop", early=False),
    sampled("an empty bad word", {"bad_words": [""]}, "bad_words", early=False),
    sampled("1,000 logprob_token_ids", {"logprob_token_ids": [1] * 1000}, "logprob_token_ids", early=False),
]
TOKENS = [
    sampled(
        f"{name} {what}",
        {name: {str(i): 1 for i in ids} if name == "logit_bias" else ids},
        f"{name}: token id {ids[-1]} is {said}",
    )
    for name in ("allowed_token_ids", "stop_token_ids", "logprob_token_ids", "logit_bias")
    for what, ids, said in (
        ("beyond the vocabulary", [5, 200_000], "not in the model's vocabulary"),
        ("of 2^32 + 5", [2**32 + 5], "not in the model's vocabulary"),
        ("below zero", [5, -1], "negative"),
    )
]
TOKENS += [
    sampled(
        "unknown stop token with min_tokens", {"stop_token_ids": [10**6], "min_tokens": 3}, "stop_token_ids: token id 1000000"
    ),
    sampled("no token allowed", {"allowed_token_ids": []}, "allowed_token_ids", early=False),
    sampled("a bias of 10^30", {"logit_bias": {"5": 1e30}, "max_tokens": 4}, ANSWER, early=False),
    sampled("a bias that is infinite", '{"logit_bias": {"5": 1e999}}', "must be a finite number"),
    Case("special tokens as text", lambda: {"text_input": "</s><s><pad><unk><|endoftext|>" * 3}, ANSWER, early=False),
]
CONSTRAINTS = [
    constrained("an empty schema text", "json", "", "structured_outputs.json must not be empty"),
    constrained("an empty regex", "regex", "", "structured_outputs.regex must not be empty"),
    constrained("an empty grammar", "grammar", "", "structured_outputs.grammar must not be empty"),
    constrained("no choice", "choice", [], "structured_outputs.choice must not be empty"),
    constrained("json_object that is false", "json_object", False, ANSWER, early=False),
    constrained("choice of 800 kB", "choice", ["x" * 800] * 1000, "structured_outputs.choice has 800000 characters"),
    constrained("100,000 choices", "choice", ["x"] * 100_000, "structured_outputs.choice has 100000 entries"),
    constrained("enum of 5,000", "json", {"enum": [str(i) for i in range(5000)]}, "has 5000 entries of enumerations"),
    constrained("many enums", "json", {"anyOf": [{"enum": list(range(600))}, {"enum": list(range(600))}]}, "1200 entries of"),
    constrained("regex of 1 MB", "regex", "a" * 1_000_000, "structured_outputs.regex has 1000000 characters"),
    constrained("regex of 20,000 characters", "regex", "ab" * 10_000, "with its repetitions written out, 20000"),
    constrained("nested parentheses", "regex", "(" * 5000 + "a" + ")" * 5000, "levels of parentheses"),
    constrained("nested repetition", "regex", "((a{100}){100}){100}", "with its repetitions written out"),
    constrained("a repetition of 10^9", "regex", "a{1000000000}", "with its repetitions written out"),
    constrained("a repetition up to 10^9", "regex", "a{0,1000000000}", "with its repetitions written out"),
    constrained("(a+)+b", "regex", "(a+)+b", ANSWER, early=False),
    constrained("^(.*)$", "regex", "^(.*)$", ANY, early=False),
    constrained("^(|.*)$", "regex", "^(|.*)$", ANY, early=False),
    constrained("a broken regex", "regex", "[a", "", early=False),
    constrained("a look-ahead", "regex", "(?=a)b", ANY, early=False),
    constrained("a back-reference", "regex", r"(a)\1", ANY, early=False),
    constrained("a grammar", "grammar", 'root ::= "a"', ANSWER, early=False),
    constrained("a malformed grammar after it", "grammar", "root ::= (", "", early=False),
    constrained("a grammar that calls itself first", "grammar", 'root ::= root "a"', ANY, early=False),
    constrained("a grammar without root", "grammar", 'other ::= "a"', "", early=False),
    constrained("a grammar with an unknown rule", "grammar", "root ::= nothing", "", early=False),
    constrained("grammar of 1 MB", "grammar", 'root ::= "' + "a" * 900_000 + '"', "structured_outputs.grammar has 9000"),
    constrained("a grammar's repetition", "grammar", 'root ::= "a"{1000000}', "has a repetition of 1000000"),
    constrained(
        "a grammar's parentheses", "grammar", "root ::= " + "(" * 100 + '"a"' + ")" * 100, "has 100 levels of parentheses"
    ),
    constrained("schema of 1 MB", "json", {"description": "x" * 900_000}, "structured_outputs.json has 9000"),
    constrained("a deep schema", "json", json.dumps({"items": nested(100, {})}), ANY, early=False),
    constrained(
        "a schema's pattern", "json", {"type": "string", "pattern": "((x{99}){99}){99}"}, "with its repetitions written out"
    ),
    constrained("a schema's maxLength", "json", {"type": "string", "maxLength": 10**12}, "has a maxLength of 1000000000000"),
    constrained("a schema's minItems", "json", {"type": "array", "minItems": 10**6}, "has a minItems of 1000000"),
    constrained("an infinite maxLength", "json", '{"maxLength": 1e999}', "has a maxLength of"),
    constrained("a schema's maximum of 2^63", "json", {"type": "integer", "maximum": 2**63}, "an integer of more than 64 bits"),
    constrained("a schema's text of 2^70", "json", json.dumps({"enum": [[2**70]]}), "an integer of more than 64 bits"),
    constrained("a regex that is a number", "regex", 5, "regex", early=False),
    constrained("a schema that refers to itself", "json", {"$ref": "#"}, ANY, early=False),
    constrained("a schema that refers elsewhere", "json", {"$ref": "http://127.0.0.1:1/x"}, ANY, early=False),
    constrained("a schema of a file", "json", {"$ref": "file:///etc/passwd"}, ANY, early=False),
    constrained("a schema that nothing fits", "json", {"allOf": [{"type": "string"}, {"type": "number"}]}, ANY, early=False),
    constrained("a type that is none", "json", {"type": "thing"}, "", early=False),
    constrained("a type that is a number", "json", {"type": 5}, "", early=False),
    constrained("a schema that is no JSON", "json", "{", "structured_outputs.json is not valid JSON"),
    constrained("a structural tag that is no JSON", "structural_tag", "{", "structured_outputs.structural_tag is not valid JSON"),
    constrained("a structural tag of another form", "structural_tag", '{"type": "x"}', "", early=False),
    constrained("a white space pattern", "whitespace_pattern", "(((x{99}){99}){99})", "whitespace_pattern has, with its"),
    sampled("two constraints", {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "", early=False),
    sampled(
        "a backend of one's own", {"structured_outputs": {"regex": "a+", "_backend": "x"}, "max_tokens": 4}, ANSWER, early=False
    ),
    sampled("guided_choice of 100,000", {"guided_choice": ["x"] * 100_000}, "structured_outputs.choice has 100000 entries"),
    sampled("guided_regex that explodes", {"guided_regex": "((a{100}){100}){100}"}, "with its repetitions written out"),
    sampled(
        "response_format of a large schema",
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": [str(i) for i in range(2000)]}}}},
        "has 2000 entries of enumerations",
    ),
]
USER = {"role": "user", "content": PROMPT}
CHATS = [
    chat(f"chat_template_kwargs {name}", [USER], f"chat_template_kwargs cannot hold '{name}'", chat_template_kwargs={name: value})
    for name, value in {
        "padding": "max_length", "max_length": 10**9, "truncation": True, "return_tensors": "pt", "return_dict": True,
        "tokenize": True, "tokenizer_kwargs": {"padding": "max_length"}, "processor_kwargs": {},
        "return_assistant_tokens_mask": True,
        "padding_side": "left", "conversation": [], "self": 1, "tools": [], "__class__": 1, "x" * 50: 1,
    }.items()
]  # fmt: skip
CHATS += [
    chat("a template of one's own", [USER], "cannot hold a chat_template", chat_template_kwargs={"chat_template": "{{ 1 }}"}),
    chat("known kwargs", [USER], ANSWER, chat_template_kwargs={"enable_thinking": False, "add_generation_prompt": True}),
    chat("deep documents", [USER], "nested too deeply", chat_template_kwargs={"documents": nested(70)}),
    chat("5,000 messages", [USER] * 5000, "messages have 5000 roles"),
    chat("5,000 hidden messages", [{"role": "user"}] * 5000, "messages have 5000 roles"),
    chat("a long conversation", [USER] * 1000, "characters; this model's maximum context length is"),
    chat("a deep message", [{"role": "user", "content": nested(100)}], "messages is nested too deeply"),
    chat("5,000 parts", [{"role": "user", "content": ["x"] * 5000}], "messages have 5000 parts"),
    chat("content that is an object", [{"role": "user", "content": {"a": 1}}], "messages[0].content must be a string or a list"),
    chat("content that is a number", [{"role": "user", "content": 5}], "messages[0].content must be a string or a list"),
    chat("a part that is a number", [{"role": "user", "content": [5]}], "content[0] must be a string or an object"),
    chat("a part without a type", [{"role": "user", "content": [{"x": 1}]}], ANY),
    chat("a role that is a list", [{"role": ["user"], "content": "x"}], "messages[0].role must be a string"),
    chat("600 tools", [USER], "tools has 600 entries", tools=[{"type": "function"}] * 600),
    chat("tools of 2 MB", [USER], "tools has 2", tools=[{"x": "y" * 2_000_000}]),
    chat("deep tools", [USER], "tools is nested too deeply", tools=[{"x": nested(70)}]),
    Case(
        "a message of 50 MB",
        lambda: {"messages": json.dumps([{"role": "user", "content": "x" * 50_000_000}])},
        "messages have, without pictures, audios and videos, 50000033 characters",
        heavy=True,
    ),
    Case(
        "a million messages",
        lambda: {"messages": "[" + ",".join(['{"role":"u"}'] * 1_000_000) + "]"},
        "messages have, without pictures, audios and videos, 13000001 characters",
        heavy=True,
    ),
    Case(
        "300,000 messages",
        lambda: {"messages": "[" + ",".join(['{"role":"u"}'] * 300_000) + "]"},
        "messages have 300000 roles",
        heavy=True,
    ),
]
NOTHING = "nothing is fetched from there"
PLACES = {
    "http": "http://127.0.0.1:1/a.png", "https": "https://example.com/a.png", "another case": "HTTP://127.0.0.1:1/a.png",
    "file": "file:///etc/passwd", "a path": "/etc/passwd", "ftp": "ftp://127.0.0.1/a", "metadata": "http://169.254.169.254/latest",
    "a backslash": "http://example.com\\@127.0.0.1/a", "a user": "http://example.com@127.0.0.1/a", "IPv6": "http://[::1]/a",
    "half an IPv6": "http://[::1/a", "no scheme": "//127.0.0.1/a", "a space before": " http://127.0.0.1:1/a", "empty": "",
    "a line break": "http://127.0.0.1\n/a", "gopher": "gopher://127.0.0.1/", "a number": "http://2130706433/", "jar": "jar:http://x/",
}  # fmt: skip
REACHES = [
    said(f"{kind} from {what}", {"type": kind, kind: {"url": url}}, NOTHING)
    for kind in ("image_url", "audio_url", "video_url")
    for what, url in PLACES.items()
]
REACHES += [
    said("a picture without a type", {"image_url": "http://127.0.0.1:1/a.png"}, NOTHING),
    said("a picture of the other protocol", {"type": "input_image", "image_url": "http://127.0.0.1:1/a.png"}, NOTHING),
    said("a text part that has a picture", {"type": "text", "text": "a", "image_url": "http://127.0.0.1:1/"}, NOTHING),
    said("a place that is a list", {"type": "image_url", "image_url": {"url": ["http://x"]}}, "must be a string, or an object"),
    said("a picture with a uuid", {"type": "image_url", "image_url": None, "uuid": "5"}, "'uuid' is not taken"),
]
REACHES += [
    said(f"{name} in a message", {"type": name, name: "AAAA", "data": "AAAA"}, f"'{name}' is not taken from a request")
    for name in ("prompt_embeds", "image_embeds", "audio_embeds", "video_embeds", "image_pil")
]
ONE = png(5, 6)
PICTURES = [
    shown("a picture for a model of texts", picture(ONE), "image: this model takes texts only"),
    shown("a PNG of 177 million pixels", picture(png(13_300, 13_300)), "13300 x 13300 has 176890000 pixels"),
    shown("a PNG of 2^62 pixels", picture(png(2**31 - 1, 2**31 - 1)), "pixels; this model takes at most"),
    shown("a PNG with a second header", picture(png(5, 6, 60_000, 60_000)), "60000 x 60000 has 3600000000 pixels"),
    shown("a JPEG of 4 billion pixels", picture(jpeg(65_535, 65_535)), "65535 x 65535 has"),
    shown("a JPEG with a second header", picture(jpeg(5, 6, 65_535, 65_535)), "65535 x 65535 has"),
    shown("a JPEG that hides its size", picture(jpeg(65_535, 65_535, before=60_000)), "65535 x 65535 has"),
    shown("a JPEG without pixels", picture(jpeg(5, 6)[:-4]), "cannot be decoded: it is damaged"),
    shown("a JPEG of fillers", picture(b"\xff\xd8\xff" + b"\xff" * 9000), "cannot be decoded: it is damaged"),
    shown("a WEBP of 2^28 pixels", picture(webp("VP8L", 16_384, 16_384)), "16384 x 16384 has"),
    shown("an extended WEBP of 2^48 pixels", picture(webp("VP8X", 1 << 24, 1 << 24)), "16777216 x 16777216 has"),
    shown("a lossy WEBP of 2^28 pixels", picture(webp("VP8 ", 16_383, 16_383)), "16383 x 16383 has"),
    shown("a GIF", picture(b"GIF89a" + bytes(50)), "it is not a PNG, JPEG or WEBP"),
    shown("a TIFF", picture(b"II*\0" + bytes(50)), "it is not a PNG, JPEG or WEBP"),
    shown("a PostScript program", picture(b"%!PS-Adobe-3.0 EPSF-3.0\n" + bytes(50)), "it is not a PNG, JPEG or WEBP"),
    shown("an SVG", picture(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "it is not a PNG, JPEG or WEBP"),
    shown("no base64", "not base64!", "image[0] is not valid base64"),
    shown("other characters", "ä" * 50, "image[0] is not valid base64"),
    shown("nothing", "", "it is not a PNG, JPEG or WEBP"),
    shown("two pictures of 20 million pixels", [picture(png(5000, 4000))] * 2, "the pictures have 40000000 pixels"),
    shown("17 pictures", [picture(ONE)] * 17, "image has 17 elements"),
    shown("100,000 pictures", [""] * 100_000, "image has 100000 elements"),
    Case(
        "a picture of 20 MB",
        lambda: {"text_input": PROMPT, "image": picture(ONE + bytes(20 << 20))},
        "image[0] has 2",
        heavy=True,
    ),
    said("a picture in a message", {"type": "image_url", "image_url": data_url(ONE)}, "messages: this model takes texts only"),
    said("a large picture in a message", {"type": "image_url", "image_url": data_url(png(50_000, 50_000))}, "50000 x 50000 has"),
    said(
        "a large picture, DATA",
        {"type": "image_url", "image_url": {"url": "DATA:;base64," + picture(png(50_000, 9000))}},
        "pixels",
    ),
    said(
        "frames as a film",
        {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64," + "AAAA," * 5000}},
        "not valid base64",
    ),
    chat(
        "17 pictures in messages",
        [{"role": "user", "content": [{"type": "image_url", "image_url": data_url(ONE)}] * 17}],
        "17 pictures",
    ),
    said(
        "sound for a model of texts",
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        "takes texts only",
    ),
    said(
        "sound without data",
        {"type": "input_audio", "input_audio": {"format": "wav"}},
        "must be a string, or an object with 'data'",
    ),
]
EMBEDDINGS = [
    Case(name, lambda value=value: {"embedding_request": json.dumps({"input": value})}, expected)
    for name, value, expected in (
        ("embed 2^32 + 5", [2**32 + 5], "token id 4294967301 is not in the model's vocabulary"),
        ("embed 2^70", [2**70], "is not in the model's vocabulary"),
        ("embed a boolean", [True], "must be a non-empty string or list of token ids"),
        ("embed lists", [[1], [[2]]], "must be a non-empty string or list of token ids"),
        ("embed 300 tokens", [1] * 300, "the prompt has 300 tokens; this"),
        ("embed 50,000 words", "word " * 50_000, "the prompt has 250000 characters; this"),
        ("embed 257 texts", ["x"] * 257, "embedding_request.input has 257 inputs; this model takes at most 256"),
        ("embed texts, one too long", ["x", "word " * 50_000], "the prompt has 250000 characters; this"),
        ("embed ids, one unknown", [[1], [2**70]], "is not in the model's vocabulary"),
        ("embed with a model of answers", "hello", "does not support 'embed' request"),
    )
]
SCORES = [
    Case(name, lambda value=value: {"embedding_request": json.dumps(value)}, expected)
    for name, value, expected in (
        ("rank 257 texts", {"query": "q", "documents": ["x"] * 257}, "documents has 257 texts; this model takes at most 256"),
        ("score unequal sides", {"text_1": ["a", "b"], "text_2": ["c"]}, "must be one text or as many as text_2: 1, not 2"),
        ("rank nothing", {"query": "q", "documents": []}, "documents must be a non-empty string"),
        ("rank objects", {"query": "q", "documents": [{"multi_modal": "file:///etc/passwd"}]}, "documents must be a non-empty"),
        ("rank by a template", {"query": "q", "documents": ["a"], "chat_template": "{{ 1 }}"}, "has no field 'chat_template'"),
        ("rank with a model of answers", {"query": "q", "documents": ["a"]}, "does not support 'score' request"),
    )
]
OPERATORS = [
    Case(f"operator {name}", lambda value=value: {"operator_request": value}, "this model takes no operator requests")
    for name, value in (("sleep", '{"operation": "sleep"}'), ("nothing", ""), ("no JSON", "{"), ("deep", "[" * 100_000))
]
FIELDS = [
    Case(f"field {name}", lambda values=values: {"text_input": PROMPT, "sampling_parameters": json.dumps(values)}, expected)
    for name, values, expected in (
        ("kv_transfer_params", {"kv_transfer_params": {"remote_host": "evil"}}, "'kv_transfer_params' is not allowed"),
        ("extra_args", {"extra_args": {"kv_transfer_params": {}}}, "'extra_args' is not allowed"),
        ("session_id", {"session_id": "s"}, "'session_id' is not allowed"),
        ("data_parallel_rank", {"data_parallel_rank": 2**31}, "'data_parallel_rank' is not allowed"),
        ("long salt", {"cache_salt": "x" * 257}, "'cache_salt' must be a string of 1 to 256 characters"),
        ("no salt", {"cache_salt": ""}, "'cache_salt' must be a string of 1 to 256 characters"),
    )
]
CORPUS = [*SIZES, *AMOUNTS, *TOKENS, *CONSTRAINTS, *CHATS, *REACHES, *PICTURES, *EMBEDDINGS, *SCORES, *OPERATORS, *FIELDS]
