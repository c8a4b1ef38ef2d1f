"""A job that names an adapter of the operator's directory holds it until vLLM has ended with the job."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from support.engine_parts import PROMISED, Llm, added, output
from support.fake_reply import fake_job
from support.patience import wait_for
from triton_vllm.base.errors import InvalidRequestError


class Store:
    """In place of the real one: one adapter, whose users the test counts."""

    def __init__(self):
        self.version = SimpleNamespace(request=SimpleNamespace(lora_name="a@1"), users=0)
        self.named = []
        self.given_up = 0

    async def acquire(self, llm, name):
        self.named.append(name)
        if name != "a":
            raise InvalidRequestError(f"LoRA {name} is not supported")
        self.version.users += 1
        return self.version

    def is_due(self):
        return False

    def give_up(self):
        self.given_up += 1

    def close(self):
        self.closed = True


@pytest.fixture
def engine(started):
    """An engine with a store."""
    engine, _ = started()
    engine.runner.store = Store()
    return engine


def job(name="a"):
    made = fake_job()
    made.request.lora_name = name
    return made


def test_an_adapter_is_held_until_the_last_output(engine):
    """vLLM is given it with the request; nobody else's is touched."""
    j, plain = job(), job(None)
    _, put = added(engine, j)
    added(engine, plain)
    assert (j.lora.lora_name, engine.runner.store.version.users) == ("a@1", 1)
    assert (plain.lora, engine.runner.store.named) == (None, ["a"])
    put(output(finished=False))
    assert engine.runner.store.version.users == 1
    put(output(finished=True))
    assert engine.runner.store.version.users == 0


def test_an_adapter_is_held_until_vllm_knows_of_a_cancellation(engine):
    """Not only until the client does: it would be read again in the middle of a step."""
    j = job()
    llm, _ = added(engine, j)
    seen = []
    abort = llm.abort

    async def note(request_id):
        seen.append(engine.runner.store.version.users)
        await abort(request_id)

    llm.abort = note
    engine.runner.cancel(j)
    wait_for(lambda: llm.aborted)
    wait_for(lambda: engine.runner.store.version.users == 0)
    assert seen == [1]


def test_a_request_that_vllm_refuses_gives_its_adapter_back(engine):
    """Else it could never be unloaded."""
    Llm.started[-1].add_error = RuntimeError("no")
    engine.runner.submit(j := job())
    wait_for(lambda: j.ended)
    wait_for(lambda: engine.runner.store.version.users == 0)
    assert engine.runner.store.named == ["a"]


def test_an_unknown_adapter_is_refused(started):
    """With the store's own text; the engine is not asked."""
    engine, got = started()
    engine.runner.store = Store()
    engine.runner.submit(job("b"))
    _, item = got.get(timeout=PROMISED)
    assert str(item) == "LoRA b is not supported"
    assert Llm.started[-1].collectors == {}


def test_a_dead_engine_ends_the_waits_for_it(engine):
    """What waits for EngineCore would wait for ever."""
    Llm.started[-1].errored = True
    wait_for(lambda: engine.runner.store.given_up)
