"""A pooling request with several parts is as many requests to vLLM, and one answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.engine_parts import PROMISED, Llm
from support.fake_reply import FakeChannel
from support.patience import wait_for
from triton_vllm.answer import Reply
from triton_vllm.base.errors import CancelledError, InternalError, InvalidRequestError
from triton_vllm.base.protocols import Gathered
from triton_vllm.base.wants import Wants
from triton_vllm.engine.engine import UNLOADED
from triton_vllm.job import Job
from triton_vllm.pooling.embedding import EmbedRequest, Part


def job(count=3, **part):
    parts = tuple(Part(text=str(number), **part) for number in range(count))
    return Job(EmbedRequest(parts, Wants(), "embed", {}), None, Reply(FakeChannel()))


def number(value):
    data = np.array([value])
    data_ = SimpleNamespace(numel=lambda: data.size, tolist=data.tolist)
    return SimpleNamespace(finished=True, outputs=SimpleNamespace(data=data_), prompt_token_ids=[1])


@pytest.fixture
def begun(started):
    """A job whose three parts vLLM has; the engine, the queue of what was put, and what puts outputs."""
    engine, got = started()
    engine.runner.submit(j := job())
    llm = Llm.started[-1]
    wait_for(lambda: all("put" in vars(llm.collectors.get(name, SimpleNamespace())) for name in j.ids))
    return engine, got, j, [llm.collectors[name].put for name in j.ids]


def test_outputs_are_put_together_in_the_order_of_the_parts(begun):
    """Whichever comes first; the job ends once, with the last."""
    engine, got, j, puts = begun
    assert engine.runner.in_flight.count() == 3
    outputs = [number(n) for n in range(3)]
    for n in (2, 0, 1):
        assert got.empty()
        puts[n](outputs[n])
    reply, item = got.get(timeout=PROMISED)
    assert reply is j.reply
    assert isinstance(item, Gathered)
    assert list(item.outputs) == outputs
    assert (engine.runner.in_flight.count(), engine.runner.in_flight.jobs()) == (0, [])


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


def test_an_output_of_another_kind_is_nobody_elses_matter(begun):
    """Raised to vLLM, what it leads to would end the output handler of all requests."""
    engine, got, j, puts = begun
    odd = number(0)
    odd.outputs.data = None
    puts[1](odd)
    assert isinstance(got.get(timeout=PROMISED)[1], InternalError)
    wait_for(lambda: Llm.started[-1].aborted == list(j.ids))
    assert engine.runner.is_up()


def test_a_cancelled_request_ends_all_its_parts(begun):
    """By the ids that vLLM knows."""
    engine, got, j, _ = begun
    engine.runner.cancel(j)
    assert isinstance(got.get(timeout=PROMISED)[1], CancelledError)
    wait_for(lambda: Llm.started[-1].aborted == list(j.ids))
    assert engine.runner.in_flight.count() == 0


def test_a_part_that_vllm_refuses_takes_back_those_before_it(started):
    """Nothing of a refused request stays in vLLM."""
    engine, got = started()
    llm: Any = Llm.started[-1]
    add = llm.add_request

    async def refuse_second(request_id, *args, **kwargs):
        if request_id.endswith(".1"):
            raise RuntimeError("no")
        return await add(request_id, *args, **kwargs)

    llm.add_request = refuse_second
    engine.runner.submit(j := job())
    assert isinstance(got.get(timeout=PROMISED)[1], InternalError)
    wait_for(lambda: j.id in llm.aborted)
    assert set(llm.collectors) == {j.id}


def test_pairs_are_put_together_by_vllm(started):
    """Each with its own parameters, which tell where the second text begins."""
    engine, _ = started()
    seen = []

    async def make_pair(llm, part, params):
        seen.append((part.text, part.second))
        return {"prompt_token_ids": [1]}, SimpleNamespace(part=part.text)

    engine.runner._prompter.make_pair = make_pair
    engine.runner.submit(j := job(2, second="d"))
    wait_for(lambda: len(Llm.started[-1].collectors) == 2)
    assert seen == [("0", "d"), ("1", "d")]
    assert not j.ended


@pytest.mark.parametrize("count", [1, 3])
def test_an_answer_of_too_many_numbers_is_not_waited_for(started, count):
    """One that fits is; of the other nothing is kept, and vLLM is told to leave the rest. 0 is no limit."""
    engine, got = started()
    llm = Llm.started[-1]
    for most, refused in ((0, False), (count * 4, False), (count * 4 - 1, True)):
        j = job(count)
        j.most_numbers = most
        engine.runner.submit(j)
        wait_for(lambda j=j: all("put" in vars(llm.collectors.get(name, SimpleNamespace())) for name in j.ids))
        for name in j.ids:
            llm.collectors[name].put(number([1.0] * 4))
        item = got.get(timeout=PROMISED)[1]
        assert isinstance(item, InvalidRequestError) is refused
        if refused:
            assert f"more than {most} numbers" in str(item)
            wait_for(lambda j=j: llm.aborted == list(j.ids))
    assert (engine.runner.in_flight.count(), engine.runner.in_flight.jobs(), engine.runner.is_up()) == (0, [], True)


def test_a_bulky_answer_is_in_flight_until_it_is_written(begun):
    """A lane of them has room for as many as there may be requests; its writer is the sender, not vLLM."""
    engine, got, j, puts = begun
    j.reply.bulky = True
    for n, put in enumerate(puts):
        put(number(n))
    got.get(timeout=PROMISED)
    assert (engine.runner.in_flight.count(), engine.runner.in_flight.jobs()) == (3, [])
    j.reply.send([], final=True)
    assert engine.runner.in_flight.count() == 0
    wait_for(lambda: not engine.runner.in_flight._unwritten)  # nor is what it holds kept


@pytest.mark.parametrize("end", [lambda engine: engine.leave(0.0), lambda engine: engine.stop(0.0)])
def test_a_bulky_answer_that_is_not_written_when_the_grace_is_over_is_refused(begun, end):
    """What waits to be written would keep the server for minutes."""
    engine, got, j, puts = begun
    j.reply.bulky = True
    for n, put in enumerate(puts):
        put(number(n))
    got.get(timeout=PROMISED)
    assert j.reply.refusal is None
    end(engine)
    wait_for(lambda: str(j.reply.refusal) == UNLOADED)


def test_an_error_is_not_written_for_long(begun):
    """It waits for no turn of its own."""
    engine, got, j, _ = begun
    j.reply.bulky = True
    engine.runner.cancel(j)
    got.get(timeout=PROMISED)
    assert engine.runner.in_flight.count() == 0
