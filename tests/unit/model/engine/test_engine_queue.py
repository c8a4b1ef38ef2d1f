"""How long a request may take that says nothing about it, and how long it may wait until vLLM begins with it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from support.engine_parts import PROMISED, STEP, Llm, LoopClock, Never, TickingClock, added, output
from support.fake_reply import FakeChannel
from support.fake_reply import fake_job as job
from support.patience import wait_for
from triton_vllm.answer import Reply
from triton_vllm.base.errors import UnavailableError
from triton_vllm.base.limits import Limits
from triton_vllm.job import Job
from triton_vllm.operator.request import OperatorRequest

LIMIT = 100  # s in the queue; more than STEP, after which a request without output is logged
REFUSED = "the model has not begun to work on the request after 100 s in the queue; try again later"


class Ids(dict):
    """In place of vLLM's ids of requests: keeps which were asked for."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def get(self, key, default=None):
        self.asked.append(key)
        return super().get(key, default)


class Processor:
    """In place of vLLM's OutputProcessor."""

    def __init__(self):
        self.request_states = {}
        self.external_req_ids = Ids()

    def take(self, j, *, prefilling=True):
        own = f"{j.id}-0"
        self.external_req_ids[j.id] = [own]
        self.request_states[own] = SimpleNamespace(is_prefilling=prefilling)
        return j


@pytest.fixture
def queued(started):
    """An engine with the limit, its outcomes, its clock, and what vLLM knows of its requests."""
    engine, got = started(limits=Limits(max_queue_seconds=LIMIT))
    Llm.started[-1].output_processor = processor = Processor()
    return engine, got, TickingClock(engine), processor


def test_a_request_without_a_timeout_has_the_default_one(started):
    """The text says whose it is; one with a timeout of its own, shorter or longer, has that."""
    engine, got = started(limits=Limits(default_timeout_seconds=30))
    clock = LoopClock(engine)
    llm, _ = added(engine, plain := job())
    _, put = added(engine, patient := job(timeout=60_000_000))
    _ = added(engine, hasty := job(timeout=10_000_000))
    clock.now += 11
    assert got.get(timeout=PROMISED)[0] is hasty.reply
    clock.now += 18
    added(engine, job())
    assert got.empty()
    clock.now += 2
    reply, error = got.get(timeout=PROMISED)
    assert (reply, type(error), str(error)) == (
        plain.reply,
        UnavailableError,
        "the default timeout of 30 s expired before the request had finished",
    )
    wait_for(lambda: llm.aborted == [hasty.id, plain.id])
    engine._loop.call_soon_threadsafe(put, last := output(finished=True))
    assert got.get(timeout=PROMISED) == (patient.reply, last)


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_vllm_has_not_begun_is_refused(queued, stream):
    """Whole or streaming, it is aborted in vLLM; one that vLLM works on goes on, though a whole answer shows nothing of it."""
    engine, got, clock, processor = queued
    _, put = added(engine, working := processor.take(job(), prefilling=False))
    llm, _ = added(engine, waiting := processor.take(job(stream=stream)))
    clock.now += LIMIT + 1
    reply, error = got.get(timeout=PROMISED)
    assert (reply, type(error), str(error)) == (waiting.reply, UnavailableError, REFUSED)
    wait_for(lambda: llm.aborted == [waiting.id])
    assert any(line == "1 requests were refused after 100 s in the queue" for line in engine._log.lines)
    engine._loop.call_soon_threadsafe(put, last := output(finished=True))
    assert got.get(timeout=PROMISED) == (working.reply, last)


def test_vllm_is_asked_once_and_only_for_what_has_waited_for_long(queued):
    """With thousands in flight to ask costs time, which the tokens need."""
    engine, got, clock, processor = queued
    added(engine, working := processor.take(job(), prefilling=False))
    added(engine, streaming := processor.take(job(stream=True)))
    Llm.started[-1].collectors[streaming.id].put(output(finished=False))
    assert got.get(timeout=PROMISED)[0] is streaming.reply
    for _ in range(3):
        added(engine, waiting := processor.take(job()))
        clock.now += LIMIT + 1
        added(engine, processor.take(young := job()))
        assert got.get(timeout=PROMISED)[0] is waiting.reply
        engine.runner.cancel(young)
        assert got.get(timeout=PROMISED)[0] is young.reply
    asked = processor.external_req_ids.asked
    assert asked.count(working.id) == 1
    assert {young.id, streaming.id}.isdisjoint(asked)
    wait_for(lambda: engine.runner.in_flight.jobs() == [working, streaming])


def test_an_operator_waits_in_no_queue(queued):
    """A sleep that waits for the requests in flight is not one that vLLM has not begun."""
    engine, got, clock, processor = queued
    llm, _ = added(engine, working := processor.take(job(), prefilling=False))
    llm.model_config = SimpleNamespace(enable_sleep_mode=False)
    engine.runner.submit(sleep := Job(OperatorRequest("sleep", {}), None, Reply(FakeChannel())))
    wait_for(lambda: engine.runner.operator.asleep)
    clock.now += LIMIT + 1
    added(engine, waiting := processor.take(job()))
    clock.now += LIMIT + 1
    assert got.get(timeout=PROMISED)[0] is waiting.reply
    assert not sleep.ended
    engine.runner.cancel(sleep)
    assert got.get(timeout=PROMISED)[0] is sleep.reply
    assert engine.runner.in_flight.jobs() == [working]


def test_a_vllm_that_does_not_say_bounds_streams_only(started):
    """There the first output of a stream is the sign; a whole answer may be half done, and goes on."""
    engine, got = started(limits=Limits(max_queue_seconds=LIMIT))
    clock = TickingClock(engine)
    _, put = added(engine, whole := job())
    added(engine, waiting := job(stream=True))
    _, show = added(engine, begun := job(stream=True))
    show(output(finished=False))
    assert got.get(timeout=PROMISED)[0] is begun.reply
    clock.now += STEP + 1
    wait_for(lambda: any("had no output" in line for line in engine._log.lines))
    clock.now += LIMIT - STEP
    reply, error = got.get(timeout=PROMISED)
    assert (reply, str(error)) == (waiting.reply, REFUSED)
    for one, finish in ((whole, put), (begun, show)):
        engine._loop.call_soon_threadsafe(finish, last := output(finished=True))
        assert got.get(timeout=PROMISED) == (one.reply, last)


def test_a_request_that_is_still_being_added_waits_too(queued):
    """Its tokenizer takes its time, or the event loop has not come to it."""
    engine, got, clock, _ = queued
    engine.runner._prompter = Never()
    engine.runner.submit(tokenized := job())
    wait_for(lambda: tokenized.task is not None)
    engine.runner._begin = lambda _: None
    engine.runner.submit(untouched := job())
    clock.now += LIMIT + 1
    told = dict(got.get(timeout=PROMISED) for _ in range(2))
    assert {reply: str(error) for reply, error in told.items()} == {tokenized.reply: REFUSED, untouched.reply: REFUSED}
    assert engine.runner.in_flight.jobs() == []


def test_without_a_limit_a_request_may_wait_for_ever(started):
    """0, as everywhere, is none."""
    engine, got = started(limits=Limits(max_queue_seconds=0))
    Llm.started[-1].output_processor = processor = Processor()
    clock = TickingClock(engine)
    added(engine, waiting := processor.take(job()))
    clock.now += 1e6
    wait_for(lambda: any("had no output" in line for line in engine._log.lines))  # the same check has looked at it
    assert got.empty()
    assert engine.runner.in_flight.jobs() == [waiting]
