"""A job that names an adapter has it until vLLM has ended with the job: by that its files stay."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from support.engine_parts import PROMISED, Llm, LoopClock, added, output
from support.fake_reply import fake_job
from support.patience import wait_for
from triton_vllm.engine import jobs
from triton_vllm.engine.jobs import LINGER_S
from triton_vllm.lora.store import Version


class Store:
    """In place of the real one: it has the adapter `a`, and forgets what it has given to a job."""

    def __init__(self):
        self.given: Any = None
        self.named = []
        self.given_up = 0

    async def acquire(self, llm, name):
        self.named.append(name)
        version = Version((), 0, SimpleNamespace(lora_name="a@1"))
        self.given = weakref.ref(version)
        return version

    def is_in_use(self):
        gc.collect()
        return self.given() is not None

    def give_up(self):
        self.given_up += 1

    def close(self):
        self.closed = True


@pytest.fixture
def engine(started, monkeypatch):
    """An engine with a store, and what it puts."""
    monkeypatch.setattr(jobs, "LINGER_S", 0.01)
    return started(store=Store())


def job():
    return fake_job(lora_name="a")


def test_an_adapter_is_in_use_until_vllm_knows_of_a_cancellation(engine):
    """Not only until the client does: it may be read again in the middle of a step."""
    engine, got = engine
    j = job()
    llm, _ = added(engine, j)
    seen = []

    async def note(request_id):
        del llm.collectors[request_id]
        seen.append(engine.runner.store.is_in_use())

    llm.abort = note
    engine.jobs.cancel(j.job)
    del j, _
    got.get(timeout=PROMISED)
    wait_for(lambda: seen)
    wait_for(lambda: not engine.runner.store.is_in_use())
    assert seen == [True]


def test_a_request_that_vllm_refuses_gives_its_adapter_back(engine):
    """Else its files would stay."""
    engine, got = engine

    async def refuse(*args, **options):
        raise RuntimeError("no")

    llm: Any = Llm.started[-1]
    llm.add_request = refuse
    job().submit(engine)
    got.get(timeout=PROMISED)
    wait_for(lambda: not engine.runner.store.is_in_use())
    assert engine.runner.store.named == ["a"]


def test_an_adapter_lingers_after_its_request(started):
    """EngineCore may be in a step with it, and has not been told yet."""
    engine, got = started(store=Store())
    clock = LoopClock(engine)
    llm, put = added(engine, j := job())
    engine._loop.call_soon_threadsafe(put, output(finished=True))
    got.get(timeout=PROMISED)
    llm.collectors.clear()
    del j, put
    for passed, kept in ((LINGER_S - 1, True), (2, False)):
        clock.now += passed
        engine._loop.call_soon_threadsafe(lambda: None)
        wait_for(lambda kept=kept: engine.runner.store.is_in_use() is kept)
    assert llm.aborted == []
