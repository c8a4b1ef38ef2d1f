"""What an engine promises each request: one outcome, in time, whatever vLLM makes of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from support.engine_parts import (
    PROMISED,
    DeadError,
    FailureError,
    Llm,
    PassingError,
    RefusalError,
    added,
    output,
    raised,
)
from support.fake_reply import fake_job as job
from support.patience import wait_for
from triton_vllm.base.errors import DEAD, InternalError, InvalidRequestError, UnavailableError
from triton_vllm.vllm_api.refusals import REQUEST_FAILED, REQUEST_MAY_SUCCEED


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
    job().submit(engine)
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


def test_the_same_failure_again_is_a_line_in_the_log(started):
    """A vLLM that has moved on fails for every request: one traceback tells why, and each request has its line."""
    engine, got = started()
    for number in range(3):
        Llm.started[-1].add_error = TypeError(f"add_request() got an unexpected keyword argument with {number}")
        job().submit(engine)
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
        (j := job()).submit(engine)
    else:
        _, put = added(engine, j := job())
        engine._loop.call_soon_threadsafe(put, put_there)
    item = got.get(timeout=PROMISED)[1]
    assert (type(item), str(item)) == (type(told), str(told))
    wait_for(lambda: llm.aborted == [j.id])
    assert engine._log.lines == []
    assert engine.jobs.is_up()


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
    assert engine.jobs.ledger.jobs() == []


def test_one_failed_completion_of_several_ends_the_request(started):
    """Those that go on are aborted: a part of an answer is none."""
    engine, got = started()
    j = job(n=2)
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
