"""The optional outputs, n > 1, and the inputs beyond the official backend's, on the real server."""

from __future__ import annotations

import itertools
import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from support.model_requests import STRANGE, ask, ask_all, prompt
from support.reference import kept_reference
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from pathlib import Path

    from support.serving import Parts
    from vllm_env.serve.server import TritonServer

pytestmark = pytest.mark.e2e
PROMPT, ANSWER = FACTS[2]
GREEDY = {"temperature": 0, "max_tokens": 64}
FLAGS = {
    f"return_{name}": True
    for name in (
        "finish_reason",
        "cumulative_logprob",
        "logprobs",
        "num_input_tokens",
        "num_output_tokens",
        "token_ids",
    )
}


@pytest.fixture(scope="module")
def tokenizer(standin_model: Path) -> dict[str, int]:
    """The stand-in's tokens by text; `Ġ` stands for a space."""
    vocabulary: dict[str, int] = json.loads((standin_model / "tokenizer.json").read_text())["model"]["vocab"]
    return vocabulary


@pytest.mark.parametrize("streaming", [False, True])
def test_optional_outputs_agree_with_each_other(server: TritonServer, tokenizer: dict[str, int], streaming: bool) -> None:
    """Counts, token ids, log probabilities and texts of one answer describe the same tokens, whole or streamed."""
    answer = ask(server, PROMPT, {**GREEDY, "logprobs": 2}, stream=streaming, exclude_input_in_output=True, **FLAGS)
    tokens = answer.token_ids()
    positions = [entry for part in answer.values("logprobs") for entry in json.loads(part[0])]
    chosen = [entry[str(token)] for token, entry in zip(tokens, positions, strict=True)]
    assert sum(part[0] for part in answer.values("num_output_tokens")) == len(tokens)
    assert tokens[-1] == tokenizer["</s>"]
    assert "".join(entry["decoded_token"] for entry in chosen[:-1]) == ANSWER == answer.text
    assert all(entry["rank"] == 1 and entry["logprob"] <= 0 for entry in chosen)
    assert all(len(entry) in (2, 3) for entry in positions)
    (total,) = answer.values("cumulative_logprob")[-1]
    assert total == pytest.approx(sum(entry["logprob"] for entry in chosen), abs=1e-4)
    reasons = [part[0] for part in answer.values("finish_reason")]
    assert reasons == [b"None"] * (len(reasons) - 1) + [b"stop"]
    assert {tuple(part) for part in answer.values("num_input_tokens")} == {(prompt_length(server),)}


def prompt_length(server: TritonServer) -> int:
    """The prompt's tokens, counted by asking for their log probabilities."""
    answer = ask(server, PROMPT, {"max_tokens": 1, "prompt_logprobs": 0}, return_prompt_logprobs=True)
    return len(json.loads(answer.values("prompt_logprobs")[0][0]))


def test_a_client_may_have_tokens_gathered(server: TritonServer) -> None:
    """All responses but the last carry as many tokens as asked for, after a first token; the answer is the same.

    On a busy machine, one response may carry the tokens of several.
    """
    parameters = {**GREEDY, "ignore_eos": True, "max_tokens": 15}
    expected = ask(server, PROMPT, parameters, stream=True, return_token_ids=True).token_ids()
    answer = ask(server, PROMPT, {**parameters, "stream_interval": 4}, stream=True, return_token_ids=True)
    sizes = [len(part) for part in answer.values("token_ids")]
    sent = list(itertools.accumulate(sizes[:-1]))
    assert {number % 4 for number in sent} <= {1}
    assert len(sizes) < len(expected)
    assert answer.token_ids() == expected


@pytest.mark.parametrize("streaming", [False, True])
def test_stop_string_ends_the_answer_and_is_named(server: TritonServer, streaming: bool) -> None:
    """The text before the stop string is all that comes, and `stop_reason` names the string."""
    parameters = {**GREEDY, "stop": [" river"]}
    flags = {"return_stop_reason": True, "return_finish_reason": True}
    answer = ask(server, PROMPT, parameters, stream=streaming, exclude_input_in_output=True, **flags)
    assert answer.text == ANSWER.partition(" river")[0]
    assert answer.values("stop_reason")[-1] == [b'" river"']
    assert answer.values("finish_reason")[-1] == [b"stop"]


@pytest.mark.slow
def test_n_four_with_a_seed_equals_the_engine_in_process(server: TritonServer, parts: Parts) -> None:
    """Whole and streamed, each of four sampled completions is, at its index, what vLLM itself samples."""
    parameters = {"n": 4, "seed": 7, "temperature": 1.5, "max_tokens": 24, "ignore_eos": True}
    texts = [PROMPT, *STRANGE]
    engine = {
        **json.loads((server.repository / "vllm" / "vllm_engine_args.json").read_text()),
        "disable_log_stats": True,
    }
    request = {"engine_args": engine, "prompts": [{"prompt": text, "parameters": parameters} for text in texts]}
    answers = kept_reference(parts.environment, "reference_engine.py", request, parts.standin)
    wanted = [[one["text"] for one in four] for four in answers]
    assert all(len(set(four)) == 4 for four in wanted)
    whole = [prompt(text, parameters, exclude_input_in_output=True) for text in texts]
    assert [answer.texts() for answer in ask_all(server, whole)] == wanted
    streamed = [prompt(text, parameters, stream=True) for text in texts]
    assert [answer.texts() for answer in ask_all(server, streamed)] == wanted


def test_n_completions_end_each_by_itself(server: TritonServer) -> None:
    """In a stream every completion gets its own tokens and its own last finish reason."""
    parameters = {"n": 3, "seed": 1, "temperature": 2.0, "max_tokens": 20}
    answer = ask(server, PROMPT, parameters, stream=True, return_finish_reason=True, return_num_output_tokens=True)
    counts = [sum(column) for column in zip(*answer.values("num_output_tokens"), strict=True)]
    assert all(0 < count <= 20 for count in counts)
    reasons = [[word for word in column if word != b"None"] for column in zip(*answer.values("finish_reason"), strict=True)]
    assert [len(words) for words in reasons] == [1, 1, 1]


def test_prompt_token_ids_are_the_prompt(server: TritonServer, tokenizer: dict[str, int]) -> None:
    """Token ids in place of a text give the same answer, as text and as token ids."""
    given = prompt_ids(server)
    by_text = ask(server, PROMPT, GREEDY, exclude_input_in_output=True, return_token_ids=True)
    by_ids = ask(server, None, GREEDY, prompt_token_ids=given, return_token_ids=True)
    assert (by_ids.text, by_ids.token_ids()) == (by_text.text, by_text.token_ids())
    assert by_ids.text == ANSWER


def prompt_ids(server: TritonServer) -> list[int]:
    """The prompt's token ids: the model takes the first for granted, so it is looked for among all."""
    answer = ask(server, PROMPT, {"max_tokens": 1, "prompt_logprobs": 0}, return_prompt_logprobs=True)
    positions = json.loads(answer.values("prompt_logprobs")[0][0])
    assert positions[0] is None
    rest = [int(next(iter(entry))) for entry in positions[1:]]
    text = "".join(next(iter(entry.values()))["decoded_token"] for entry in positions[1:])
    first = PROMPT.removesuffix(text)
    found = ask(server, first, {"max_tokens": 1, "structured_outputs": {"choice": [first]}}, return_token_ids=True)
    return [*found.token_ids(), *rest]


SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "constraint",
    [
        {"structured_outputs": {"json": SCHEMA}},
        {"guided_json": json.dumps(SCHEMA)},
        {"guided_decoding": {"json": SCHEMA}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    ],
    ids=lambda c: next(iter(c)),
)
def test_json_schema_in_every_spelling(server: TritonServer, tokenizer: dict[str, int], constraint: dict[str, Any]) -> None:
    """The answer is a document of the schema, which the stand-in would never write by itself."""
    # JSON allows white space for ever, which is what this model would choose
    bias = {str(number): -100 for token, number in tokenizer.items() if not set(token) - set("ĠĊĉč")}
    parameters = {**GREEDY, **constraint, "logit_bias": bias}
    document = json.loads(ask(server, PROMPT, parameters, exclude_input_in_output=True).text)
    assert document["city"] in ("Paris", "Rome")
    assert 0 <= document["age"] <= 9


@pytest.mark.parametrize(
    ("constraint", "allowed"),
    [
        ({"structured_outputs": {"regex": "[0-9]{3}-[xyz]"}}, r"[0-9]{3}-[xyz]"),
        ({"guided_regex": "[0-9]{3}-[xyz]"}, r"[0-9]{3}-[xyz]"),
        ({"structured_outputs": {"choice": ["blue", "red"]}}, "blue|red"),
        ({"guided_choice": ["blue", "red"]}, "blue|red"),
        ({"structured_outputs": {"grammar": 'root ::= "a" "b"{3} "c"'}}, "abbbc"),
    ],
    ids=lambda c: str(c)[:48],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_regex_choice_and_grammar(server: TritonServer, constraint: dict[str, Any], allowed: str, streaming: bool) -> None:
    """Text outside the constraint cannot come."""
    answer = ask(server, PROMPT, {**GREEDY, **constraint}, stream=streaming, exclude_input_in_output=True)
    assert re.fullmatch(allowed, answer.text), answer
