"""A pooling request with several parts is as many requests to vLLM, and one answer."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from support.engine_parts import PROMISED, Llm
from support.fake_reply import Asked, fake_reply
from support.patience import wait_for
from triton_vllm.base.errors import CancelledError, InternalError, InvalidRequestError
from triton_vllm.engine.engine import UNLOADED
from triton_vllm.engine.order import Order, Prompt
from triton_vllm.pooling.gathering import Gathered


def job(count=3, *, most=0, bulky=False):
    prompts = tuple(Prompt(text=str(number)) for number in range(count))
    return Asked(Order(prompts, None, most_numbers=most), fake_reply(bulky=bulky))


def ids(j):
    return [j.id, *(f"{j.id}.{number}" for number in range(1, len(j.order.prompts)))]


def number(value):
    data = np.array([value])
    data_ = SimpleNamespace(numel=lambda: data.size, tolist=data.tolist)
    return SimpleNamespace(finished=True, outputs=SimpleNamespace(data=data_), prompt_token_ids=[1])


@pytest.fixture
def begun(started, request):
    """A job whose three parts vLLM has; the engine, the queue of what was put, and what puts outputs."""
    engine, got = started()
    (j := job(bulky=getattr(request, "param", False))).submit(engine)
    llm = Llm.started[-1]
    wait_for(lambda: all("put" in vars(llm.collectors.get(name, SimpleNamespace())) for name in ids(j)))
    return engine, got, j, [llm.collectors[name].put for name in ids(j)]


def test_outputs_are_put_together_in_the_order_of_the_parts(begun):
    """Whichever comes first; the job ends once, with the last."""
    engine, got, j, puts = begun
    assert engine.jobs.ledger.count() == 3
    outputs = [number(n) for n in range(3)]
    for n in (2, 0, 1):
        assert got.empty()
        puts[n](outputs[n])
    reply, item = got.get(timeout=PROMISED)
    assert reply is j.reply
    assert isinstance(item, Gathered)
    assert list(item.outputs) == outputs
    assert (engine.jobs.ledger.count(), engine.jobs.ledger.jobs()) == (0, [])


def test_a_part_that_fails_ends_the_request_and_the_others(begun):
    """vLLM is told to leave them; later outputs are dropped."""
    _, got, _, puts = begun
    failed = number(0)
    failed.error = RuntimeError("secret")
    puts[1](failed)
    assert isinstance(got.get(timeout=PROMISED)[1], InternalError)
    wait_for(lambda: len(Llm.started[-1].aborted) == 3)
    puts[0](number(1))
    puts[2](number(2))
    assert got.empty()


def test_a_cancelled_request_ends_all_its_parts(begun):
    """By the ids that vLLM knows."""
    engine, got, j, _ = begun
    engine.jobs.cancel(j.job)
    assert isinstance(got.get(timeout=PROMISED)[1], CancelledError)
    wait_for(lambda: Llm.started[-1].aborted == ids(j))
    assert engine.jobs.ledger.count() == 0


@pytest.mark.parametrize("count", [1, 3])
def test_an_answer_of_too_many_numbers_is_not_waited_for(started, count):
    """One that fits is; of the other nothing is kept, and vLLM is told to leave the rest. 0 is no limit."""
    engine, got = started()
    llm = Llm.started[-1]
    for most, refused in ((0, False), (count * 4, False), (count * 4 - 1, True)):
        j = job(count, most=most)
        j.submit(engine)
        wait_for(lambda j=j: all("put" in vars(llm.collectors.get(name, SimpleNamespace())) for name in ids(j)))
        for name in ids(j):
            llm.collectors[name].put(number([1.0] * 4))
        item = got.get(timeout=PROMISED)[1]
        assert isinstance(item, InvalidRequestError) is refused
        if refused:
            assert f"more than {most} numbers" in str(item)
            wait_for(lambda j=j: llm.aborted == ids(j))
    assert (engine.jobs.ledger.count(), engine.jobs.ledger.jobs(), engine.jobs.is_up()) == (0, [], True)


@pytest.mark.parametrize("begun", [True], indirect=True)
def test_a_bulky_answer_is_in_flight_until_it_is_written(begun):
    """A lane of them has room for as many as there may be requests; its writer is the sender, not vLLM."""
    engine, got, j, puts = begun
    for n, put in enumerate(puts):
        put(number(n))
    got.get(timeout=PROMISED)
    assert (engine.jobs.ledger.count(), engine.jobs.ledger.jobs()) == (3, [])
    j.reply.send([], final=True)
    assert engine.jobs.ledger.count() == 0
    wait_for(lambda: not engine.jobs.ledger._unwritten)  # nor is what it holds kept


@pytest.mark.parametrize("begun", [True], indirect=True)
@pytest.mark.parametrize("end", [lambda engine: engine.leave(0.0), lambda engine: engine.stop(0.0)])
def test_a_bulky_answer_that_is_not_written_when_the_grace_is_over_is_refused(begun, end):
    """What waits to be written would keep the server for minutes."""
    engine, got, j, puts = begun
    for n, put in enumerate(puts):
        put(number(n))
    got.get(timeout=PROMISED)
    assert j.reply.refusal is None
    end(engine)
    wait_for(lambda: str(j.reply.refusal) == UNLOADED)
