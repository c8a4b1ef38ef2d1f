"""A request becomes a job with all that vLLM will be asked, or is answered with the reason why not."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from support import fake_vllm
from support.fake_triton import FINAL, Request
from triton_vllm.admission.admit import Admission
from triton_vllm.delivery.response import Assembler, PoolingAssembler
from triton_vllm.errors import DEAD, InvalidRequestError

VLLM = SimpleNamespace(
    **{
        name: getattr(fake_vllm, name)
        for name in ("SamplingParams", "StructuredOutputsParams", "RequestOutputKind", "PoolingParams")
    },
    client_errors=(ValueError,),
)
EMBEDDING = b'{"input": "hello", "pooling_params": {"dimensions": 2}}'


def tensors(**values):
    return {name: np.array([value], np.object_ if isinstance(value, bytes) else None) for name, value in values.items()}


class Log:
    """Keeps what has failed."""

    def __init__(self):
        self.errors = []

    def error(self, text):
        self.errors.append(text)


def adapter(name):
    if name == "unknown":
        raise InvalidRequestError("LoRA unknown is not supported")
    return name and f"adapter {name}"


@pytest.fixture
def let(triton):
    """Admits a request; return the job, what was sent, and the admission's log."""

    def admit(request, *, tasks=("generate", "embed"), healthy=True, unload_dead=False):
        engine = SimpleNamespace(tasks=tasks, is_healthy=lambda: healthy)
        log = Log()
        job = Admission("mine", VLLM, engine, adapter, log, unload_dead=unload_dead).admit(request)
        return job, request.sender.sent, log.errors

    return admit


def test_a_prompt_becomes_a_job(let):
    """Text, parameters, adapter and priority arrive; nothing is sent yet."""
    given = tensors(text_input=b"hi", stream=True, priority=3)
    job, sent, _ = let(Request(given, '{"max_tokens": 5, "lora_name": "a"}', timeout=7))
    assert (job.request.text, job.request.priority, job.request.timeout) == ("hi", 3, 7)
    assert (job.params.max_tokens, job.params.output_kind) == (5, fake_vllm.RequestOutputKind.DELTA)
    assert job.lora == "adapter a"
    assert isinstance(job.assembler, Assembler)
    assert sent == []
    assert not job.reply.closed


@pytest.mark.parametrize(("exclude", "text"), [(None, b"hi there"), (False, b"hi there"), (True, b" there")])
def test_a_whole_answer_begins_with_the_prompt_unless_excluded(let, exclude, text):
    """As in the official backend."""
    given = tensors(text_input=b"hi", **({} if exclude is None else {"exclude_input_in_output": exclude}))
    job, _, _ = let(Request(given))
    ((_, array),) = job.assembler.build([fake_vllm.output(" there", finished=True)])
    assert list(array) == [text]


def test_an_input_to_embed_becomes_a_job(let):
    """With pooling parameters and the assembler of numbers."""
    job, sent, _ = let(Request(tensors(embedding_request=EMBEDDING)))
    assert (job.params.task, job.params.dimensions) == ("embed", 2)
    assert isinstance(job.assembler, PoolingAssembler)
    assert sent == []


@pytest.mark.parametrize(
    ("given", "tasks", "code", "message"),
    [
        ({}, ("generate",), "INVALID_ARG", "exactly one of text_input"),
        ({"text_input": b"hi"}, ("embed",), "UNSUPPORTED", "Model mine does not support 'generate' request"),
        ({"embedding_request": EMBEDDING}, ("generate",), "UNSUPPORTED", "Model mine does not support 'embed' request"),
    ],
)
def test_a_refusal_is_the_final_response(let, given, tasks, code, message):
    """The client is told why, with a code that says whose fault it is, and there is no job."""
    job, sent, errors = let(Request(tensors(**given)), tasks=tasks)
    ((response, flags),) = sent
    assert job is None
    assert flags == FINAL
    assert response.error.code == code
    assert message in response.error.message
    assert errors == []


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ('{"lora_name": "unknown"}', "LoRA unknown is not supported"),
        ('{"temperature": -1}', "temperature must be non-negative"),
        ('{"max_token": 1}', "did you mean 'max_tokens'"),
    ],
)
def test_parameters_are_checked_before_the_engine_is_asked(let, parameters, message):
    """What vLLM or the list of adapters refuses is refused here."""
    job, ((response, _),), _ = let(Request(tensors(text_input=b"hi"), parameters))
    assert job is None
    assert (response.error.code, message in response.error.message) == ("INVALID_ARG", True)


def test_an_unexpected_error_reaches_the_log_and_not_the_client(let):
    """A request must never take the model down, and an answer carries no internals."""
    request = Request({})
    request.inputs = lambda: 1 / 0
    job, ((response, flags),), errors = let(request)
    assert (job, flags, response.error.code) == (None, FINAL, "INTERNAL")
    assert "division" not in response.error.message
    assert "ZeroDivisionError" in errors[0]


@pytest.mark.parametrize("unload", [False, True])
def test_a_dead_engine_refuses_and_may_have_the_model_unloaded(let, triton, unload):
    """Only where the operator wants that: else the engine is started again."""
    job, ((response, _),), _ = let(Request(tensors(text_input=b"hi")), healthy=False, unload_dead=unload)
    assert (job, response.error.message, response.error.code) == (None, DEAD, "UNAVAILABLE")
    assert triton.unloaded == (["mine"] if unload else [])
