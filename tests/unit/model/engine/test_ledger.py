"""The requests of all instances count for the limit, from their beginning to their end."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from support.engine_parts import PROMISED, Llm, added, output
from support.fake_reply import fake_job, fake_operation, fake_reply
from support.patience import wait_for
from triton_vllm.base.errors import UnavailableError
from triton_vllm.engine.job import Job
from triton_vllm.engine.ledger import Ledger
from triton_vllm.instances.counts import Counts
from triton_vllm.openai.delivery import Collected
from triton_vllm.reply.reply import Reply

VLLM: Any = SimpleNamespace(refusals=(), busy_errors=())


@pytest.fixture
def pair(started):
    """Return an engine, its outputs, and what another instance of its model sees."""
    engine, got = started()
    memory = bytearray(Counts.size(2))
    engine.jobs.ledger._counts = Counts(memory, 0, 2)
    return engine, got, Counts(memory, 1, 2)


def test_a_request_counts_for_the_other_instance_until_it_ends(pair):
    """And those of the other count here."""
    engine, got, other = pair
    other.note(4)
    _, put = added(engine, asked := fake_job())
    assert (engine.jobs.ledger.count(), engine.jobs.ledger.count_of_all()) == (1, 5)
    assert engine.jobs.ledger.watched() == [asked.job]
    assert not engine.jobs.ledger.is_empty()
    assert other.others() == 1
    put(output(finished=True))
    got.get(timeout=PROMISED)
    assert other.others() == 0


def test_the_other_instance_sees_each_change_at_once():
    """The engine's checks come too late for it: twice a second."""
    memory = bytearray(Counts.size(2))
    ledger, other = Ledger(Counts(memory, 0, 2)), Counts(memory, 1, 2)
    job: Job[Reply] = Job(fake_reply())
    ledger.enter(job)
    assert other.others() == 1
    ledger.leave(job)
    assert other.others() == 0


def test_an_operator_request_does_not_count(pair):
    """A sleep would wait for itself, and for the wake_up that another instance has got. But it is in flight."""
    engine, _, other = pair
    job: Job[Reply] = Job(fake_reply(), 0)
    engine.jobs.ledger.enter(job)
    assert (engine.jobs.ledger.count_of_all(), other.others()) == (0, 0)
    assert not engine.jobs.ledger.is_empty()
    engine.jobs.ledger.leave(job)
    assert engine.jobs.ledger.is_empty()


def test_a_sleep_waits_for_the_requests_of_the_other_instance(pair):
    """They may be in flight only there."""
    engine, got, other = pair
    llm: Any = Llm.started[-1]
    llm.model_config = SimpleNamespace(enable_sleep_mode=False)
    slept = threading.Event()

    async def sleep(level):
        slept.set()

    llm.sleep = sleep
    other.note(1)
    fake_operation("sleep").submit(engine)
    wait_for(lambda: engine.runner.operator.asleep)
    assert not slept.wait(0.2)
    other.note(0)
    assert dict(got.get(timeout=PROMISED)[1].outputs) == {"operation": "sleep", "asleep": True}
    assert slept.is_set()


def test_requests_to_the_openai_port_count_as_well(pair):
    """Each of their completions."""
    engine, _, other = pair
    jobs = engine.jobs
    job = jobs.begin(Collected(VLLM, jobs.note_output))
    assert other.others() == 1
    jobs.ledger.weigh(job, 3)
    assert other.others() == 3
    assert jobs.ledger.watched() == []  # uvicorn knows whether its client is there
    jobs.abort(job, UnavailableError("unloaded"))
    assert (other.others(), jobs.ledger.jobs(), jobs.ledger.unwritten()) == (3, [], [job])
    jobs.finish(job)
    assert other.others() == 0
    assert jobs.ledger.is_empty()


def test_an_answer_counts_until_it_is_written(pair):
    """The other instance sees its end at the next check at the latest."""
    engine, got, other = pair
    job = fake_job(bulky=True)
    _, put = added(engine, job)
    put(output(finished=True))
    got.get(timeout=PROMISED)
    assert (other.others(), engine.jobs.ledger.is_empty()) == (1, False)
    job.reply.closed = True
    engine.jobs.ledger.tidy()
    assert (other.others(), engine.jobs.ledger.is_empty()) == (0, True)
