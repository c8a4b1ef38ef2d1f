"""The requests of all instances count for the limit, from their beginning to their end."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from support.engine_parts import PROMISED, Llm, added, output
from support.fake_reply import FakeChannel, fake_job
from support.patience import wait_for
from triton_vllm.answer import Reply
from triton_vllm.engine.in_flight import InFlight
from triton_vllm.instances.counts import Counts
from triton_vllm.job import Job
from triton_vllm.operator.request import OperatorRequest


@pytest.fixture
def pair(started):
    """Return an engine, its outputs, and what another instance of its model sees."""
    engine, got = started()
    memory = bytearray(Counts.size(2))
    engine.runner.in_flight._counts = Counts(memory, 0, 2)
    return engine, got, Counts(memory, 1, 2)


def test_a_request_counts_for_the_other_instance_until_it_ends(pair):
    """And those of the other count here."""
    engine, got, other = pair
    other.note(4)
    _, put = added(engine, fake_job())
    assert (engine.runner.in_flight.count(), engine.runner.in_flight.count_of_all()) == (1, 5)
    assert not engine.runner.in_flight.is_empty()
    assert other.others() == 1
    put(output(finished=True))
    got.get(timeout=PROMISED)
    assert other.others() == 0


def test_the_other_instance_sees_each_change_at_once():
    """The engine's checks come too late for it: twice a second."""
    memory = bytearray(Counts.size(2))
    in_flight, other = InFlight(Counts(memory, 0, 2)), Counts(memory, 1, 2)
    job = fake_job()
    in_flight.enter(job)
    assert other.others() == 1
    in_flight.leave(job)
    assert other.others() == 0


def test_an_operator_request_does_not_count(pair):
    """A sleep would wait for itself, and for the wake_up that another instance has got. But it is in flight."""
    engine, _, other = pair
    job = Job(OperatorRequest("sleep", {}), None, Reply(FakeChannel()))
    engine.runner.in_flight.enter(job)
    assert (engine.runner.in_flight.count_of_all(), other.others()) == (0, 0)
    assert not engine.runner.in_flight.is_empty()
    engine.runner.in_flight.leave(job)
    assert engine.runner.in_flight.is_empty()


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
    engine.runner.submit(Job(OperatorRequest("sleep", {}), None, Reply(FakeChannel())))
    wait_for(lambda: engine.runner.operator.asleep)
    assert not slept.wait(0.2)
    other.note(0)
    assert dict(got.get(timeout=PROMISED)[1].outputs) == {"operation": "sleep", "asleep": True}
    assert slept.is_set()


def test_requests_to_the_openai_port_count_as_well(pair):
    """Each of their completions."""
    engine, _, other = pair
    requests = engine.runner.openai_requests
    request = requests.begin()
    assert other.others() == 1
    requests.weigh(request, 3)
    assert other.others() == 3
    requests.finish(request)
    assert other.others() == 0


def test_an_answer_counts_until_it_is_written(pair):
    """The other instance sees its end at the next check at the latest."""
    engine, got, other = pair
    job = fake_job()
    job.reply.bulky = True
    _, put = added(engine, job)
    put(output(finished=True))
    got.get(timeout=PROMISED)
    assert (other.others(), engine.runner.in_flight.is_empty()) == (1, False)
    job.reply.closed = True
    engine.runner.in_flight.tidy()
    assert (other.others(), engine.runner.in_flight.is_empty()) == (0, True)
