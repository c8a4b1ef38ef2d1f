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
from triton_vllm.base.errors import InvalidRequestError
from triton_vllm.engine import runner
from triton_vllm.engine.openai_requests import LINGER_S
from triton_vllm.lora.store import Version


class Store:
    """In place of the real one: it has the adapter `a`, and forgets what it has given to a job."""

    def __init__(self):
        self.given: Any = None
        self.named = []
        self.given_up = 0

    async def acquire(self, llm, name):
        self.named.append(name)
        if name != "a":
            raise InvalidRequestError(f"LoRA {name} is not supported")
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
    monkeypatch.setattr(runner, "LINGER_S", 0.01)
    engine, got = started()
    engine.runner.store = Store()
    return engine, got


def job(name="a"):
    made: Any = fake_job()
    made.request.lora_name = name
    return made


def test_an_adapter_goes_to_vllm_with_its_request_only(engine):
    """And is in use until the answer is complete."""
    engine, got = engine
    given = []
    llm: Any = Llm.started[-1]
    add = llm.add_request

    async def note(*args, lora_request, **options):
        given.append(lora_request and lora_request.lora_name)
        return await add(*args, lora_request=lora_request, **options)

    llm.add_request = note
    j = job()
    _, put = added(engine, j)
    added(engine, job(None))
    assert given == ["a@1", None]
    assert engine.runner.store.named == ["a"]
    put(output(finished=False))
    got.get(timeout=PROMISED)
    name = j.id
    del j
    assert engine.runner.store.is_in_use()
    put(output(finished=True))
    got.get(timeout=PROMISED)
    del put, llm.collectors[name]  # as vLLM does when it has finished
    wait_for(lambda: not engine.runner.store.is_in_use())


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
    engine.runner.cancel(j)
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
    engine.runner.submit(job())
    got.get(timeout=PROMISED)
    wait_for(lambda: not engine.runner.store.is_in_use())
    assert engine.runner.store.named == ["a"]


def test_an_unknown_adapter_is_refused(engine):
    """With the store's own text; vLLM is not asked."""
    engine, got = engine
    engine.runner.submit(job("b"))
    _, item = got.get(timeout=PROMISED)
    assert str(item) == "LoRA b is not supported"
    assert Llm.started[-1].collectors == {}


def test_a_dead_engine_ends_the_waits_for_it(engine):
    """What waits for EngineCore would wait for ever."""
    engine, _ = engine
    Llm.started[-1].errored = True
    wait_for(lambda: engine.runner.store.given_up)


def test_an_adapter_lingers_after_its_request(started):
    """EngineCore may be in a step with it, and has not been told yet."""
    engine, got = started()
    engine.runner.store = Store()
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
