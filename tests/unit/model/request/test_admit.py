"""A request becomes a job with all that vLLM will be asked, or is answered with the reason why not."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support import fake_vllm
from support.fake_triton import Request
from support.gates import admitted, fit_of
from support.pictures import picture, png
from triton_vllm.base.dialect import OFFICIAL, OURS
from triton_vllm.base.errors import DEAD, InvalidRequestError, UnsupportedError
from triton_vllm.base.limits import USUAL, Limits
from triton_vllm.reply.response import Assembler
from triton_vllm.request.kinds import Served
from triton_vllm.vllm_api import Facts

VLLM: Any = SimpleNamespace(
    **{
        name: getattr(fake_vllm, name)
        for name in ("SamplingParams", "StructuredOutputsParams", "RequestOutputKind", "PoolingParams")
    },
    client_errors=(ValueError,),
)
FACTS = Facts(max_tokens=100, vocabulary=50, multimodal=False)
EMBEDDING = b'{"input": "hello", "pooling_params": {"dimensions": 2}}'
PNG = picture(png(5, 6)).encode()
PART = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG.decode()}"}}


def tensors(**values):
    return {name: np.array([value], np.object_ if isinstance(value, bytes) else None) for name, value in values.items()}


def adapter(name):
    if name == "unknown":
        raise InvalidRequestError("LoRA unknown is not supported")


@pytest.fixture
def let(triton):
    """Admits a request; return the job, and what was sent."""

    def let_in(
        request,
        *,
        tasks=("generate", "embed"),
        healthy=True,
        in_flight=0,
        limits=USUAL,
        scores="",
        asleep=False,
        dialect=OURS,
        multimodal=False,
    ):
        facts = replace(FACTS, tasks=tasks, multimodal=multimodal, scoring_task=scores)
        fit = fit_of(facts, limits, healthy=healthy, in_flight=in_flight, asleep=asleep)
        job = admitted(request, Served("mine", VLLM, fit, adapter), dialect)
        return job, request.sender.told()

    return let_in


def test_a_prompt_becomes_a_job(let):
    """Text, parameters, adapter and priority arrive; nothing is sent yet."""
    given = tensors(text_input=b"hi", stream=True, priority=3)
    job, sent = let(Request(given, '{"max_tokens": 5, "lora_name": "a"}', timeout=7))
    assert (job.order.prompts[0].text, job.order.priority, job.order.timeout) == ("hi", 3, 7)
    assert (job.order.params.max_tokens, job.order.params.output_kind) == (5, fake_vllm.RequestOutputKind.DELTA)
    assert job.order.lora_name == "a"
    assert job.streams
    assert isinstance(job.assembler, Assembler)
    assert sent == []
    assert let(Request(given, '{"n": 3}'))[0].order.weight == 3


@pytest.mark.parametrize(
    ("given", "tasks", "code", "message"),
    [
        ({}, ("generate",), "INVALID_ARG", "exactly one of text_input"),
        (
            {"text_input": b"hi"},
            ("embed",),
            "UNSUPPORTED",
            "Error generating stream: Model mine does not support 'generate' request",
        ),
        (
            {"embedding_request": EMBEDDING},
            ("generate",),
            "UNSUPPORTED",
            "Error generating stream: Model mine does not support 'embed' request",
        ),
    ],
)
def test_a_refusal_is_the_final_response(let, given, tasks, code, message):
    """The client is told why, with a code that says whose fault it is, and there is no job."""
    job, sent = let(Request(tensors(**given)), tasks=tasks)
    (response,) = sent
    assert job is None
    assert response.error.code == code
    assert message in response.error.message


def test_a_model_of_speech_takes_texts(let):
    """Its task has another name, and it transcribes the recording that comes with the text."""
    job, sent = let(Request(tensors(text_input=b"hi")), tasks=("transcription",))
    assert (job.order.prompts[0].text, sent) == ("hi", [])


def test_an_operator_may_empty_a_full_model(let):
    """What asks the engine itself is none of the requests that the limit counts."""
    limits = Limits(max_requests_in_flight=3, operator_requests=("sleep",))
    job, sent = let(Request(tensors(operator_request=b'{"operation": "sleep"}')), in_flight=3, limits=limits)
    assert (job.request.operation, sent) == ("sleep", [])


def test_log_probabilities_of_a_prompt_are_refused_where_they_end_the_engine():
    """vLLM's CPU build with LoRA; 0 is a number of them, too."""
    for count in (0, 2):
        with pytest.raises(UnsupportedError, match="prompt_logprobs: vLLM on a CPU cannot compute them"):
            fit_of(Facts(prompt_logprobs=False)).check_params(SimpleNamespace(prompt_logprobs=count))
        fit_of(Facts()).check_params(SimpleNamespace(prompt_logprobs=count))
    fit_of(Facts(prompt_logprobs=False)).check_params(SimpleNamespace(prompt_logprobs=None))


def test_a_sum_of_log_probabilities_is_there_whenever_it_is_asked_for(let):
    """Without `logprobs` vLLM sums nothing up, and the answer would be NaN, which is no JSON."""
    wanted = {"text_input": b"hi", "return_cumulative_logprob": True, "return_logprobs": True}
    job = let(Request(tensors(**wanted)))[0]
    assert job.order.params.logprobs == 0
    output = fake_vllm.output("x", finished=True)
    output.outputs[0].logprobs = [{1: SimpleNamespace(logprob=-0.5, rank=1, decoded_token="x")}]
    made = dict(job.assembler.build([output]))
    assert list(made["logprobs"]) == [b"null"]  # those were not asked for
    assert let(Request(tensors(**wanted), '{"logprobs": 3}'))[0].order.params.logprobs == 3
    assert not hasattr(let(Request(tensors(text_input=b"hi")))[0].order.params, "logprobs")


def test_a_dead_engine_refuses(let):
    """Before anything of the request is read."""
    job, (response,) = let(Request(tensors(text_input=b"hi")), healthy=False)
    assert (job, response.error.message, response.error.code) == (None, DEAD, "UNAVAILABLE")


def test_the_official_behaviour_is_that_of_each_refusal(let):
    """Words and code of the error; an empty prompt is vLLM's matter."""
    _, (response,) = let(Request({}), dialect=OFFICIAL)
    assert response.error.message.startswith("Error generating stream: exactly one of text_input")
    assert response.error.code == "INTERNAL"
    job, sent = let(Request(tensors(text_input=b""), timeout=7), dialect=OFFICIAL)
    assert (job.order.prompts[0].text, job.order.timeout, sent) == ("", 0, [])  # at Triton's timeout it does not look


def test_an_unknown_adapter_is_told_before_a_wrong_parameter(let):
    """As by the official backend, whose clients match on the text."""
    _, (response,) = let(Request(tensors(text_input=b"hi"), '{"lora_name": "unknown", "temperature": -1}'))
    assert response.error.message == "LoRA unknown is not supported"


@pytest.mark.parametrize("given", [{"text_input": b"hi"}, {"embedding_request": b'{"input": "a", "lora_name": "unknown"}'}])
def test_an_unknown_adapter_is_refused_for_each_kind_of_request(let, given):
    """A pooling request has the name in its own fields."""
    job, (response,) = let(Request(tensors(**given), '{"lora_name": "unknown"}'))
    assert (job, response.error.message) == (None, "LoRA unknown is not supported")


@pytest.mark.parametrize(("in_flight", "taken"), [(1, True), (2, False)])
def test_each_completion_counts_as_a_request(let, in_flight, taken):
    """As each input does."""
    request = Request(tensors(text_input=b"hi"), '{"n": 3, "max_tokens": 5}')
    job, sent = let(request, in_flight=in_flight, limits=Limits(max_requests_in_flight=4))
    assert (job is not None) is taken
    assert taken or "with 3 completions more than 4 requests would be in flight" in sent[0].error.message


PAIRS = b'{"query": "q", "documents": ["a", "b"]}'


def test_pairs_become_parts_as_the_model_scores_them(let):
    """A cross-encoder reads both texts together; an embedding model each by itself, the queries first."""
    job, *_ = let(Request(tensors(embedding_request=PAIRS)), tasks=("classify",), scores="classify")
    assert [(part.text, part.second) for part in job.order.prompts] == [("q", "a"), ("q", "b")]
    assert (job.order.params.task, job.order.weight) == ("classify", 2)
    job, *_ = let(Request(tensors(embedding_request=PAIRS)), scores="embed")
    assert [part.text for part in job.order.prompts] == ["q", "a", "b"]
    _, sent = let(Request(tensors(embedding_request=PAIRS)), tasks=("generate",))
    assert sent[0].error.code == "UNSUPPORTED"
    assert "Model mine does not support 'score' request" in sent[0].error.message


@pytest.mark.parametrize(("in_flight", "taken"), [(1, True), (2, False)])
def test_each_input_counts_as_a_request(let, in_flight, taken):
    """And more than there may ever be are never taken."""
    three = tensors(embedding_request=b'{"input": ["a", "b", "c"]}')
    job, sent = let(Request(three), in_flight=in_flight, limits=Limits(max_requests_in_flight=4))
    assert (job is not None) is taken
    assert taken or "with 3 inputs more than 4 requests would be in flight" in sent[0].error.message
    _, sent = let(Request(three), limits=Limits(max_requests_in_flight=2))
    assert "embedding_request has 3 inputs; this model takes at most 2" in sent[0].error.message


def test_a_sleeping_model_takes_operator_requests_only(let):
    """At once, and as UNAVAILABLE."""
    _, sent = let(Request(tensors(text_input=b"hi")), asleep=True)
    assert [(r.error.code, r.error.message) for r in sent] == [
        ("UNAVAILABLE", "the model is asleep; an operator request wakes it up")
    ]
    wake = tensors(operator_request=b'{"operation": "wake_up"}')
    job, *_ = let(Request(wake), asleep=True, limits=Limits(operator_requests=("wake_up",)))
    assert job.request.operation == "wake_up"
    _, sent = let(Request(wake), asleep=True)
    assert sent[0].error.code == "UNSUPPORTED"


@pytest.mark.parametrize(("task", "bulky"), [("embed", False), ("token_embed", True)])
def test_an_answer_with_a_vector_for_each_token_is_bounded_and_sent_aside(let, task, bulky):
    """It may take a second to write, in which nobody else should wait."""
    text = json.dumps({"input": "a", "pooling_params": {"task": task}}).encode()
    job, *_ = let(Request(tensors(embedding_request=text)), tasks=(task,))
    assert (job.bulky, job.order.most_numbers) == (bulky, 1 << 24)


def parameters(**values):
    return tensors(text_input=b"hi", sampling_parameters=json.dumps(values).encode())


def chat(*contents, **inputs):
    return tensors(messages=json.dumps([{"role": "user", "content": content} for content in contents]).encode(), **inputs)


def media(kind, *items):
    return {**tensors(text_input=b"hi"), kind: np.array(items, np.object_)}


def clip(url="data:;base64,AAAA"):
    return {"type": "audio_url", "audio_url": {"url": url}}


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
NONE: dict[str, Any] = {field.name: 0 for field in fields(Limits) if field.name.startswith("max_")}
NO_LIMITS = Limits(**NONE)
ABOVE_ONE = {
    "max_requests_in_flight": [
        tensors(text_input=b"hi"),
        tensors(embedding_request=b'{"input": ["a", "b"]}'),
        parameters(n=2),
    ],
    "max_request_bytes": [tensors(text_input=b"hi"), media("image", PNG)],
    "max_text_bytes": [
        tensors(text_input=b"hi"),
        tensors(prompt_token_ids=1),
        tensors(embedding_request=EMBEDDING),
        chat("hi"),
    ],
    "max_parameter_bytes": [parameters(n=1), chat("hi", tools=b"[]"), chat("hi", chat_template_kwargs=b"{}")],
    "max_characters_per_token": [tensors(text_input=b"x" * 101), chat("x" * 101)],
    "max_json_depth": [parameters(stop=["a"]), chat([PART]), tensors(embedding_request=EMBEDDING)],
    "max_messages": [chat("hi", "hi")],
    "max_parts": [chat([{"type": "text", "text": "a"}] * 2)],
    "max_tools": [chat("hi", tools=json.dumps([TOOL] * 2).encode(), tool_choice=b"none")],
    "max_inputs": [
        tensors(embedding_request=b'{"input": ["a", "b"]}'),
        tensors(embedding_request=b'{"query": "a", "documents": ["b", "c"]}'),
    ],
    "max_n": [parameters(n=2)],
    "max_answer_tokens": [parameters(n=2, max_tokens=1)],
    "max_logprobs": [parameters(logprobs=2), parameters(prompt_logprobs=2), parameters(logprobs=-1)],
    "max_stream_interval": [parameters(stream_interval=2)],
    "max_stop_strings": [parameters(stop=["a", "b"]), parameters(bad_words=["a", "b"])],
    "max_constraint_bytes": [parameters(guided_json={"type": "string"}), parameters(guided_choice=["a", "b"])],
    "max_constraint_depth": [parameters(guided_regex="((a))"), parameters(guided_grammar='root ::= (("a"))')],
    "max_constraint_repeats": [
        parameters(guided_regex="a{2}"),
        parameters(guided_json={"type": "string", "maxLength": 2}),
        parameters(guided_grammar='root ::= "a"{2}'),
    ],
    "max_choices": [parameters(guided_choice=["a", "b"]), parameters(guided_json={"enum": ["a", "b"]})],
    "max_images": [media("image", PNG, PNG), chat([PART, PART])],
    "max_image_bytes": [media("image", PNG), chat([PART])],
    "max_image_pixels": [media("image", PNG), chat([PART])],
    "max_clips": [media("audio", b"AAAA", b"AAAA"), media("video", b"AAAA", b"AAAA"), chat([clip(), clip()])],
    "max_clip_bytes": [media("audio", b"AAAA"), media("video", b"AAAA"), chat([clip()])],
}
"""Requests that ask for two of something, or for more, by the limit of it."""
ELSEWHERE = {
    *("max_clip_seconds", "max_video_frames", "max_frame_pixels"),  # test_clips.py and test_audio.py: with the file's header
    *("max_constraint_seconds", "max_queue_seconds", "max_pooled_numbers"),  # test_compiling, _engine_queue, _engine_parts...
    *("max_logprob_values", "max_token_ids"),  # test_cost.py
}


def test_each_limit_has_its_requests():
    """A new limit is in one of the two."""
    assert {field.name for field in fields(Limits) if field.name.startswith("max_")} == {*ABOVE_ONE} | ELSEWHERE


@pytest.mark.parametrize(("name", "given"), [(name, one) for name, several in ABOVE_ONE.items() for one in several])
def test_what_is_above_a_limit_is_told_the_limit_and_zero_is_none(let, name, given):
    """docs/parameters.md says so of all; the other limits are off."""
    one: dict[str, Any] = {name: 1}
    asked = {"in_flight": 1, "multimodal": True, "tasks": ("generate", "embed", "classify"), "scores": "classify"}
    _, sent = let(Request(given), limits=replace(NO_LIMITS, **one), **asked)
    told = "100" if name == "max_characters_per_token" else "1"  # times the model's 100 tokens
    assert re.search(rf"\b{told}\b", sent[0].error.message.rpartition(";")[2])
    job, sent = let(Request(given), limits=NO_LIMITS, **asked)
    assert (job is not None, [response.error.message for response in sent]) == (True, [])
