"""Engine outputs become tensors: merged without loss, every completion at its index, counts per response."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace as Output

import numpy as np
import pytest

from triton_vllm.base.wants import Wants
from triton_vllm.reply.response import NOTHING, Assembler, logprobs_json, string_tensor


def part(text, ids, index=0, reason=None, logprobs=None, cumulative=None, stop=None):
    """One completion's share of an engine output."""
    return Output(
        index=index,
        text=text,
        token_ids=ids,
        logprobs=logprobs,
        cumulative_logprob=cumulative,
        finish_reason=reason,
        stop_reason=stop,
    )


def output(*parts, prompt=(1, 2, 3), prompt_logprobs=None):
    return Output(outputs=list(parts), prompt_token_ids=list(prompt), prompt_logprobs=prompt_logprobs)


def lp(value, rank=1, token="t"):
    return Output(logprob=value, rank=rank, decoded_token=token)


def test_nothing_new_has_an_element_for_each_completion_in_each_output():
    """So a client reads the response that begins a stopped stream as it reads all others."""
    wants = Wants(**{field.name: field.name != "no_logprobs" for field in dataclasses.fields(Wants)})
    made = {name: array.tolist() for name, array in Assembler(wants, 2).build([NOTHING])}
    assert made == {
        "text_output": [b"", b""],
        "finish_reason": [b"None", b"None"],
        "cumulative_logprob": [0.0, 0.0],
        "logprobs": [b"null", b"null"],
        "num_input_tokens": [0],
        "num_output_tokens": [0, 0],
        "token_ids": [],
        "stop_reason": [b"null", b"null"],
        "prompt_logprobs": [b"null"],
        "kv_transfer_params": [b"null"],
        "num_cached_tokens": [0],
    }
    ((name, array),) = Assembler(Wants(), 1).build([NOTHING])
    assert (name, array.tolist()) == ("text_output", [b""])


def test_all_optional_outputs_and_their_types():
    """Types and shapes are those that config.pbtxt declares."""
    wants = Wants(*([True] * 8))
    outputs = [
        output(part("a", [1], logprobs=[{1: lp(-0.5)}], cumulative=-0.5), prompt_logprobs=[None, {2: lp(-1.0)}]),
        output(part("b", [2], logprobs=[{2: lp(-0.25)}], cumulative=-0.75, reason="stop", stop="\n")),
    ]
    made = dict(Assembler(wants, 1).build(outputs))
    assert made["num_input_tokens"].tolist() == [3]
    assert made["num_input_tokens"].dtype == np.uint32
    assert made["num_output_tokens"].tolist() == [2]
    assert made["token_ids"].dtype == np.int64
    assert made["cumulative_logprob"].dtype == np.float32
    assert json.loads(made["stop_reason"][0]) == "\n"
    assert [list(p) for p in json.loads(made["logprobs"][0])] == [["1"], ["2"]]
    assert json.loads(made["prompt_logprobs"][0])[0] is None


def test_logprobs_that_were_not_asked_of_vllm_are_null():
    """The official backend writes null then."""
    made = dict(Assembler(Wants(logprobs=True), 1).build([output(part("a", [1]))]))
    assert made["logprobs"].tolist() == [b"null"]


@pytest.mark.parametrize("value", [float("-inf"), float("inf"), float("nan"), -1e30])
def test_logprobs_are_valid_json(value):
    """JSON has no infinity."""
    text = logprobs_json([{3: lp(value)}])
    assert json.loads(text, parse_constant=pytest.fail) == [{"3": {"logprob": -9999.0, "rank": 1, "decoded_token": "t"}}]


@pytest.mark.parametrize("value", [float("-inf"), float("inf"), float("nan")])
def test_sums_of_logprobs_are_finite(value):
    """Triton's HTTP frontend writes NaN and infinity as they are, and no JSON parser need take them."""
    made = dict(Assembler(Wants(cumulative_logprob=True), 1).build([output(part("a", [1], cumulative=value))]))
    assert made["cumulative_logprob"].tolist() == [-9999.0]


def test_a_long_answers_sum_is_kept():
    """It may lie below what a single token is given."""
    made = dict(Assembler(Wants(cumulative_logprob=True), 1).build([output(part("a", [1], cumulative=-20000.0))]))
    assert made["cumulative_logprob"].tolist() == [-20000.0]


def test_texts_survive_half_a_surrogate():
    """A detokenizer may leave one; it must not break the response."""
    assert string_tensor("a\ud800").tolist() == [b"a?"]
