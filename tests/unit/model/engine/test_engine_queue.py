"""How long a request may take that says nothing about it, and how long it may wait until vLLM begins with it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from support.engine_parts import PROMISED, STEP, Llm, Never, TickingClock, added, output
from support.fake_reply import fake_job as job
from support.fake_reply import fake_operation
from support.patience import wait_for
from triton_vllm.base.limits import Limits

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

    def add(self, engine, j, *, prefilling=True):
        result = added(engine, j)
        own = f"{j.id}-0"
        self.external_req_ids[j.id] = [own]
        self.request_states[own] = SimpleNamespace(is_prefilling=prefilling)
        return result


@pytest.fixture
def queued(started):
    """An engine with the limit, its outcomes, its clock, and what vLLM knows of its requests."""
    engine, got = started(limits=Limits(max_queue_seconds=LIMIT))
    Llm.started[-1].output_processor = processor = Processor()
    return engine, got, TickingClock(engine), processor


def test_vllm_is_asked_once_and_only_for_what_has_waited_for_long(queued):
    """With thousands in flight to ask costs time, which the tokens need."""
    engine, got, clock, processor = queued
    processor.add(engine, working := job(), prefilling=False)
    processor.add(engine, streaming := job(stream=True))
    Llm.started[-1].collectors[streaming.id].put(output(finished=False))
    assert got.get(timeout=PROMISED)[0] is streaming.reply
    for _ in range(3):
        processor.add(engine, waiting := job())
        clock.now += LIMIT + 1
        processor.add(engine, young := job())
        assert got.get(timeout=PROMISED)[0] is waiting.reply
        engine.jobs.cancel(young.job)
        assert got.get(timeout=PROMISED)[0] is young.reply
    asked = processor.external_req_ids.asked
    assert asked.count(working.id) == 1
    assert {young.id, streaming.id}.isdisjoint(asked)
    wait_for(lambda: engine.jobs.ledger.jobs() == [working.job, streaming.job])


def test_an_operator_waits_in_no_queue(queued):
    """A sleep that waits for the requests in flight is not one that vLLM has not begun."""
    engine, got, clock, processor = queued
    llm, _ = processor.add(engine, working := job(), prefilling=False)
    llm.model_config = SimpleNamespace(enable_sleep_mode=False)
    (sleep := fake_operation("sleep")).submit(engine)
    wait_for(lambda: engine.runner.operator.asleep)
    clock.now += LIMIT + 1
    processor.add(engine, waiting := job())
    clock.now += LIMIT + 1
    assert got.get(timeout=PROMISED)[0] is waiting.reply
    assert not sleep.job.ended
    engine.jobs.cancel(sleep.job)
    assert got.get(timeout=PROMISED)[0] is sleep.reply
    assert engine.jobs.ledger.jobs() == [working.job]


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
    (tokenized := job()).submit(engine)
    wait_for(lambda: tokenized.job.task is not None)
    engine.runner._begin = lambda *_: None
    (untouched := job()).submit(engine)
    clock.now += LIMIT + 1
    told = dict(got.get(timeout=PROMISED) for _ in range(2))
    assert {reply: str(error) for reply, error in told.items()} == {tokenized.reply: REFUSED, untouched.reply: REFUSED}
    assert engine.jobs.ledger.jobs() == []
