"""What an engine promises each request: one outcome, in time, whatever vLLM makes of it."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import pytest

from support.engine_parts import (
    PROMISED,
    DeadError,
    FailureError,
    Llm,
    LoopClock,
    PassingError,
    RefusalError,
    added,
    output,
    raised,
)
from support.fake_reply import fake_job as job
from support.patience import wait_for
from triton_vllm.base.errors import DEAD, CancelledError, InternalError, InvalidRequestError, UnavailableError
from triton_vllm.vllm_api.refusals import REQUEST_FAILED, REQUEST_MAY_SUCCEED


def test_outputs_come_in_order_and_end_with_the_finished_one(started):
    """What vLLM puts is passed on as it is; after the finished one the job is gone and late ones are dropped."""
    engine, got = started()
    j = job()
    _, put = added(engine, j)
    first, last = output(finished=False), output(finished=True)
    put(first)
    put(last)
    put(output(finished=False))
    assert [got.get(timeout=PROMISED)[1] for _ in range(2)] == [first, last]
    assert got.empty()
    assert engine.runner.in_flight.jobs() == []


def test_what_the_parsers_know_goes_to_vllm_with_the_request(started, monkeypatch):
    """From where on a constraint holds; a request without parsers brings nothing."""
    engine, _ = started()
    told = []
    add: Any = Llm.add_request

    async def add_request(self, *args, lora_request, priority, **more):
        told.append(more)
        return await add(self, *args, lora_request, priority)

    monkeypatch.setattr(Llm, "add_request", add_request)
    chat: Any = job()
    chat.conversation = SimpleNamespace(engine_options=lambda prompt: {"reasoning_ended": prompt == {"prompt": "x"}})
    for j in (chat, job()):
        added(engine, j)
    assert told == [{"reasoning_ended": True}, {}]


def test_an_output_that_came_before_attaching_is_not_lost(started):
    """vLLM may have put an output into the collector already when `add_request` returns."""
    engine, got = started()
    early = output(finished=True)
    Llm.started[-1].early = early
    engine.runner.submit(job())
    assert got.get(timeout=PROMISED)[1] is early


@pytest.mark.parametrize(
    ("cause", "told"),
    [
        (raised(ValueError("prompt too long"), "vllm.v1.engine.processor"), InvalidRequestError("prompt too long")),
        (raised(ValueError("x" * 5000), "vllm.sampling_params"), InvalidRequestError("x" * 5000)),
        (TypeError("add_request() got an unexpected keyword argument 'priority'"), InternalError()),
        (raised(ValueError("secret internals"), "numpy.core"), InternalError()),
        (DeadError(), UnavailableError(DEAD)),
        (RuntimeError("secret internals"), InternalError()),
    ],
)
def test_errors_are_translated(started, cause, told):
    """vLLM's refusal reaches the client; an error that is not the client's is logged and carries no internals there."""
    engine, got = started()
    Llm.started[-1].add_error = cause
    engine.runner.submit(job())
    item = got.get(timeout=PROMISED)[1]
    assert type(item) is type(told)
    assert not isinstance(told, InvalidRequestError) or str(item) == str(told)
    assert "secret" not in str(item)
    assert len(engine._log.lines) == isinstance(told, InternalError)
    assert all("Traceback" in line and str(cause) in line for line in engine._log.lines)
    Llm.started[-1].add_error = None
    _, put = added(engine, j := job())  # and the next one is served
    put(last := output(finished=True))
    assert got.get(timeout=PROMISED) == (j.reply, last)


def test_what_vllm_keeps_of_a_request_that_it_failed_to_take_is_aborted(started):
    """It knows of a request before it sends it on; what cannot be sent would stay there for ever."""
    engine, got = started()
    (llm := Llm.started[-1]).add_error = OverflowError("can't serialize ints")
    engine.runner.submit(j := job())
    assert isinstance(got.get(timeout=PROMISED)[1], InternalError)
    wait_for(lambda: llm.aborted == [j.id])


def test_the_same_failure_again_is_a_line_in_the_log(started):
    """A vLLM that has moved on fails for every request: one traceback tells why, and each request has its line."""
    engine, got = started()
    Llm.started[-1].add_error = TypeError("add_request() got an unexpected keyword argument 'priority'")
    for _ in range(3):
        engine.runner.submit(job())
        got.get(timeout=PROMISED)
    assert ["Traceback" in line for line in engine._log.lines].count(True) == 1
    assert len(engine._log.lines) == 3


def test_a_failed_output_handler_is_nobodys_fault(started):
    """vLLM gives its exception to everyone in flight: all may try again, and the log has it once."""
    engine, got = started()
    puts = [added(engine, job())[1] for _ in range(3)]
    error = raised(ValueError("a detokenizer's fault"), "vllm.v1.engine.output_processor")
    for put in puts:
        engine._loop.call_soon_threadsafe(put, error)
    told = [got.get(timeout=PROMISED)[1] for _ in puts]
    assert {(type(e), str(e)) for e in told} == {(UnavailableError, DEAD)}
    assert [line.count("Traceback") for line in engine._log.lines] == [1]


@pytest.mark.parametrize(
    ("put_there", "told"),
    [
        (
            RefusalError("Invalid structured outputs: no such type"),
            InvalidRequestError("Invalid structured outputs: no such type"),
        ),
        (PassingError("Generation is paused."), UnavailableError(REQUEST_MAY_SUCCEED)),
        (FailureError("Internal server error"), InternalError(REQUEST_FAILED)),
    ],
)
@pytest.mark.parametrize("early", [True, False])
def test_an_exception_of_one_request_is_no_dead_engine(started, put_there, told, early):
    """vLLM 0.33 puts one for a request that EngineCore has not taken; the engine lives, and what is left of it is aborted."""
    engine, got = started()
    llm = Llm.started[-1]
    if early:
        llm.early = put_there
        engine.runner.submit(j := job())
    else:
        _, put = added(engine, j := job())
        engine._loop.call_soon_threadsafe(put, put_there)
    item = got.get(timeout=PROMISED)[1]
    assert (type(item), str(item)) == (type(told), str(told))
    wait_for(lambda: llm.aborted == [j.id])
    assert engine._log.lines == []
    assert engine.runner.is_up()


class Pooled:
    """In place of a tensor of pooled numbers."""

    def __init__(self, count):
        self.numel = lambda: count


def pooled(count, error=None):
    return SimpleNamespace(finished=True, outputs=SimpleNamespace(data=Pooled(count)), error=error)


@pytest.mark.parametrize(
    ("last", "kind"),
    [
        (output(finished=True, reason="error"), InternalError),
        (pooled(0), InternalError),
        (pooled(0, SimpleNamespace(retryable=True)), UnavailableError),
        (pooled(0, SimpleNamespace(retryable=False)), InternalError),
    ],
)
def test_a_request_that_failed_in_the_engine_is_no_success(started, last, kind):
    """vLLM ends it with an output that says so and has no text or numbers: the client is told an error."""
    engine, got = started()
    j = job()
    _, put = added(engine, j)
    put(last)
    told = got.get(timeout=PROMISED)[1]
    assert type(told) is kind
    assert "the engine could not finish this request" in str(told)
    assert engine.runner.in_flight.jobs() == []


@pytest.mark.parametrize("last", [output(finished=True, reason="stop"), pooled(3)])
def test_a_request_that_succeeded_is_none_of_these(started, last):
    """Its last output is passed on as it is."""
    engine, got = started()
    _, put = added(engine, job())
    put(last)
    assert got.get(timeout=PROMISED)[1] is last


def test_one_failed_completion_of_several_ends_the_request(started):
    """Those that go on are aborted: a part of an answer is none."""
    engine, got = started()
    j = job()
    j.several = True
    llm, put = added(engine, j)
    put(output(finished=False, index=0))
    engine._loop.call_soon_threadsafe(put, output(finished=False, reason="error", index=1))
    assert not got.get(timeout=PROMISED)[1].finished
    assert isinstance(got.get(timeout=PROMISED)[1], InternalError)
    wait_for(lambda: llm.aborted == [j.id])
    put(output(finished=True, reason="stop", index=0))
    assert got.empty()


def test_an_exception_over_an_output_stays_with_its_request(started):
    """It is raised in vLLM's output handler, which would end, and everyone's requests with it."""
    engine, got = started()
    llm, put = added(engine, j := job())
    engine._loop.call_soon_threadsafe(put, SimpleNamespace())  # no output at all
    assert isinstance(got.get(timeout=PROMISED)[1], InternalError)
    wait_for(lambda: llm.aborted == [j.id])
    assert "an output was not taken" in engine._log.lines[0]


def test_a_cancelled_job_is_aborted_and_told(started):
    """The engine stops working on it, the client gets CANCELLED, and nothing follows."""
    engine, got = started()
    j = job()
    llm, put = added(engine, j)
    engine.runner.cancel(j)
    assert isinstance(got.get(timeout=PROMISED)[1], CancelledError)
    wait_for(lambda: llm.aborted == [j.id])
    put(output(finished=True))
    assert got.empty()


def test_a_deadline_aborts(started):
    """A request that is late ends with UNAVAILABLE within its timeout (in microseconds)."""
    engine, got = started()
    clock = LoopClock(engine)
    j = job(timeout=50_000)
    llm, _ = added(engine, j)
    clock.now += 0.049
    with pytest.raises(queue.Empty):
        got.get(timeout=0.2)
    clock.now += 0.002
    item = got.get(timeout=PROMISED)[1]
    assert isinstance(item, UnavailableError)
    assert "timeout of 50000 us" in str(item)
    wait_for(lambda: llm.aborted == [j.id])
