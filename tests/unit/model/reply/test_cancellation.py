"""Requests cancelled at any moment are stopped, whether the engine was idle or busy.

The engine, its watch and their threads are real; vLLM is a stand-in that never answers, so only a cancellation ends a request.
"""

from __future__ import annotations

import asyncio
import queue
import random
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from support.engine_parts import Prompter
from support.fake_log import FakeLog
from support.fake_reply import FakeChannel, fake_job
from support.patience import LIMIT, pause, wait_for
from triton_vllm.base.errors import CancelledError
from triton_vllm.base.limits import USUAL
from triton_vllm.engine.engine import Engine, Pace
from triton_vllm.instances.source import Sole
from triton_vllm.reply.watch import CancellationWatch

REQUESTS = 200


class Silent:
    """In place of AsyncLLM: takes requests and never answers."""

    errored = False
    model_config = None

    def __init__(self):
        self.working: set[str] = set()

    async def get_supported_tasks(self):
        return ("generate",)

    async def add_request(self, request_id, prompt, params, lora_request=None, priority=0):
        await asyncio.sleep(random.random() / 1000)
        self.working.add(request_id)
        return SimpleNamespace(get_nowait=lambda: None)

    async def abort(self, request_id):
        self.working.discard(request_id)

    async def is_sleeping(self):
        return False

    def shutdown(self):
        pass


class Slow(Prompter):
    """A prompter that takes its time."""

    async def make(self, llm, request):
        await asyncio.sleep(random.choice((0, random.random() / 100)))


@pytest.fixture
def serving():
    """Yield what takes a job, the stand-in and the outcomes."""
    llm, slow = Silent(), cast("Any", Slow())
    got: queue.Queue[Any] = queue.Queue()
    vllm: Any = SimpleNamespace(
        AsyncEngineArgs=lambda **_: None,
        AsyncLLM=SimpleNamespace(from_engine_args=lambda *_, **__: llm),
        UsageContext=SimpleNamespace(API_SERVER=None),
        EngineDeadError=KeyError,
        enable_envs_cache=None,
        disable_envs_cache=None,
        step_timeout_s=LIMIT,
    )
    engine = Engine(vllm, Sole(vllm, {}), slow, log=FakeLog(), limits=USUAL, pace=Pace(restart=False))
    engine.start(lambda job, item: got.put((job, item)))
    watch = CancellationWatch(engine.runner.in_flight.jobs, engine.runner.cancel, FakeLog())
    watch.start()

    def take(job):
        engine.runner.submit(job)
        watch.wake()

    yield take, engine, llm, got
    engine.stop(0)
    watch.close()


def cancelled(got, number):
    """Wait for that many outcomes; return the jobs."""
    found = [got.get(timeout=LIMIT) for _ in range(number)]
    assert {type(item) for _, item in found} == {CancelledError}
    return [job for job, _ in found]


def nothing_left(engine, llm):
    wait_for(lambda: not llm.working, "the end of what vLLM works on")
    return engine.runner.in_flight.jobs() == []


def test_cancelled_on_an_idle_server(serving):
    """Each request comes alone, when the watch sleeps or is about to: no later one would wake it again."""
    take, engine, llm, got = serving
    for number in range(REQUESTS // 10):
        channel = FakeChannel()
        channel.cancelled = number % 2 == 0  # before it was taken
        job = fake_job(channel)
        take(job)
        pause(random.random() / 50)
        channel.cancelled = True
        assert cancelled(got, 1) == [job.reply]
        job.reply.fail(CancelledError("Request was cancelled"))
    assert nothing_left(engine, llm)


def test_cancelled_on_a_busy_server(serving):
    """Hundreds at random moments, from two threads: none runs on."""
    take, engine, llm, got = serving
    channels = [FakeChannel() for _ in range(REQUESTS)]

    def cancel_some(mine):
        for channel in mine:
            channel.cancelled = True
            pause(random.random() / 500)

    canceller = threading.Thread(target=cancel_some, args=(random.sample(channels, REQUESTS),))
    canceller.start()
    jobs = [fake_job(channel) for channel in channels]
    for job in jobs:
        take(job)
        pause(random.random() / 500)
    canceller.join()
    assert set(cancelled(got, REQUESTS)) == {job.reply for job in jobs}
    assert got.empty()
    assert nothing_left(engine, llm)
