"""Operator requests to several instances of one engine: each holds for all, and they do not get in each other's way."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from support.engine_parts import Log
from support.patience import LIMIT
from triton_vllm.base.errors import UnavailableError
from triton_vllm.instances.counts import Counts
from triton_vllm.instances.sleep import SleepState
from triton_vllm.operator import run
from triton_vllm.operator.request import OperatorRequest
from triton_vllm.operator.run import Operator

CALLED_OFF = "wake_up was asked for before the requests in flight had ended"


class Llm:
    """In place of a front end of an engine that all instances share; a call waits until it may go on."""

    model_config = SimpleNamespace(enable_sleep_mode=False)

    def __init__(self):
        self.calls = []
        self.begun = asyncio.Event()
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.error = None

    async def _call(self, name):
        self.begun.set()
        await self.may_go_on.wait()
        if self.error:
            raise self.error
        self.calls.append(name)
        return True

    async def sleep(self, level):
        await self._call("sleep")

    async def wake_up(self):
        await self._call("wake_up")

    async def reset_prefix_cache(self):
        return await self._call("reset")


class Instance:
    """An instance with its operator."""

    def __init__(self, llm, index, memories, turn):
        self.llm = llm
        self.counts = Counts(memories[0], index, 2)
        self.state = SleepState(memories[1], index, 2, turn)
        self.requests = 0
        self.operator = Operator(lambda: self.requests + self.counts.others(), self.state, None, Log())
        self.wanted = True

    def note(self, requests):
        self.requests = requests
        self.counts.note(requests)

    def start(self, operation):
        return asyncio.create_task(self.operator.run(self.llm, OperatorRequest(operation, {}), lambda: self.wanted))

    async def ask(self, operation):
        return await asyncio.wait_for(self.start(operation), LIMIT)


@pytest.fixture
async def pair(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "LOOK_PERIOD_S", 0.001)
    llm, memories = Llm(), (bytearray(Counts.size(2)), bytearray(SleepState.size(2)))
    return [Instance(llm, index, memories, tmp_path / "operator") for index in range(2)]


async def until(condition):
    async def holds():
        while not condition():  # noqa: ASYNC110 - the memory of the instances tells nobody
            await asyncio.sleep(0.001)

    await asyncio.wait_for(holds(), LIMIT)


def refusing(pair):
    """Return which instances refuse requests."""
    return [one.operator.asleep for one in pair]


async def test_a_sleep_waits_for_the_requests_of_all_instances(pair):
    """All refuse what is new meanwhile, and any of them wakes the model up."""
    first, second = pair
    second.note(1)
    sleep = first.start("sleep")
    await until(lambda: refusing(pair) == [True, True])
    assert [one.state.closed for one in pair] == [False, False]
    second.note(0)
    assert (await sleep).outputs == {"operation": "sleep", "asleep": True}
    assert [one.state.closed for one in pair] == [True, True]
    await second.ask("wake_up")
    assert (refusing(pair), first.llm.calls) == ([False, False], ["sleep", "wake_up"])


async def test_a_request_that_begins_while_the_engine_is_closed_is_waited_for(pair):
    """Another instance has looked before, and counts it after this one has counted."""
    first, second = pair
    late = iter([True])

    def in_flight():
        found = first.counts.others()
        if next(late, False):
            second.note(1)
        return found

    first.operator._in_flight = in_flight
    sleep = first.start("sleep")
    await until(lambda: second.state.closed)
    for _ in range(5):
        await asyncio.sleep(0.001)
    assert (sleep.done(), first.llm.calls) == (False, [])
    second.note(0)
    await sleep
    assert first.llm.calls == ["sleep"]


async def test_a_sleep_that_waits_is_called_off_through_another_instance(pair):
    """All take requests again."""
    first, second = pair
    second.note(1)
    sleep = first.start("sleep")
    await until(lambda: refusing(pair) == [True, True])
    await second.ask("wake_up")
    with pytest.raises(UnavailableError, match=CALLED_OFF):
        await asyncio.wait_for(sleep, LIMIT)
    assert (refusing(pair), first.llm.calls) == ([False, False], ["wake_up"])


async def test_a_wake_up_does_not_overtake_a_sleep_that_the_engine_carries_out(pair):
    """Otherwise the engine would sleep, and all instances would take requests."""
    first, second = pair
    first.llm.may_go_on.clear()
    sleep = first.start("sleep")
    await first.llm.begun.wait()
    wake = second.start("wake_up")
    for _ in range(5):
        await asyncio.sleep(0.001)
    assert refusing(pair) == [True, True]
    first.llm.may_go_on.set()
    await asyncio.gather(sleep, wake)
    assert (refusing(pair), first.llm.calls) == ([False, False], ["sleep", "wake_up"])


async def test_sleeps_that_time_out_in_two_instances_leave_the_model_awake(pair):
    """Neither finds the other's refusal and takes it for the state before."""
    first, second = pair
    second.note(1)
    sleeps = [one.start("sleep") for one in pair]
    await until(lambda: refusing(pair) == [True, True])
    first.wanted = second.wanted = False
    errors = await asyncio.gather(*sleeps, return_exceptions=True)
    assert sorted(map(str, errors)) == ["sleep was not begun in time", "the requests in flight have not ended in time"]
    assert refusing(pair) == [False, False]


async def test_a_second_sleep_that_fails_leaves_the_engine_asleep(pair):
    """Only a first one leaves it awake."""
    first, second = pair
    first.llm.error = RuntimeError("injected")
    with pytest.raises(RuntimeError):
        await first.ask("sleep")
    assert refusing(pair) == [False, False]
    first.llm.error = None
    await first.ask("sleep")
    first.llm.error = RuntimeError("injected")
    with pytest.raises(RuntimeError):
        await second.ask("sleep")
    assert refusing(pair) == [True, True]
    first.llm.error = None
    assert (await second.ask("wake_up")).outputs["asleep"] is False
    assert refusing(pair) == [False, False]
