"""The event loop is shared: its rounds are counted by a callback in each of them, and work costs seconds of a clock in hand."""

from __future__ import annotations

import asyncio

import pytest

from triton_vllm.engine.turns import Turns

BUDGET = 2.0


class Loop:
    """A clock that only work moves, and the seconds that each round of the real event loop took by it."""

    def __init__(self):
        self.now = 0.0
        self.rounds = []
        self.order = []
        self.turns = Turns(BUDGET, lambda: self.now)

    async def work(self, name, cost):
        await self.turns.take()
        self.now += cost
        self.order.append(name)

    async def run(self, tasks):
        while not all(task.done() for task in tasks):
            before = self.now
            await asyncio.sleep(0)
            self.rounds.append(self.now - before)


async def burst(costs):
    """Let requests of these costs arrive in one round; return what the loop saw."""
    loop = Loop()
    await loop.run([asyncio.create_task(loop.work(name, cost)) for name, cost in enumerate(costs)])
    return loop


@pytest.mark.parametrize(("count", "cost"), [(2000, 1.0), (2000, 0.125), (50, 5.0)])
def test_no_round_takes_longer_than_the_budget_and_one_request(count, cost):
    """However many arrive at once; the outputs of running requests are seen to between two rounds."""
    seen = asyncio.run(burst([cost] * count))
    assert sum(seen.rounds) == count * cost
    assert max(seen.rounds) < BUDGET + cost
    assert seen.order == list(range(count))


def test_what_fits_the_budget_works_at_once():
    """An ordinary number of arrivals pays nothing for this."""
    assert asyncio.run(burst([0.125] * 16)).rounds == [2.0]


def test_a_request_that_comes_later_works_later():
    """It does not overtake those that wait, nor does it wait for ever behind newer ones."""

    async def stream_of_arrivals():
        loop = Loop()
        tasks = [asyncio.create_task(loop.work(name, 3.0)) for name in range(5)]
        for name in range(5, 20):
            await asyncio.sleep(0)
            tasks.append(asyncio.create_task(loop.work(name, 3.0)))
        await loop.run(tasks)
        return loop.order

    assert asyncio.run(stream_of_arrivals()) == list(range(20))


def test_a_request_that_is_given_up_holds_nobody_back():
    """Its turn goes to the next one."""

    async def given_up():
        loop = Loop()
        tasks = [asyncio.create_task(loop.work(name, 3.0)) for name in range(4)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        tasks[2].cancel()
        await loop.run(tasks)
        return loop.order

    assert asyncio.run(given_up()) == [0, 3]


def test_an_idle_loop_starts_a_new_budget():
    """What was spent before is forgotten once everybody has worked."""

    async def twice():
        loop = Loop()
        for _ in range(2):
            await loop.run([asyncio.create_task(loop.work(name, 1.0)) for name in range(2)])
            await asyncio.sleep(0)
        return loop.rounds

    assert asyncio.run(twice()) == [2.0, 2.0]
