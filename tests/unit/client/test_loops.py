"""loadtest.loops: every request that is sent gets an outcome, however the loop ends."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from loadtest.loops import closed_loop, open_loop
from loadtest.record import Outcome, Record, Request

if TYPE_CHECKING:
    from collections.abc import Iterator


class Fake:
    """Answers at once, but not requests whose number is in `held`; one whose number is `broken` raises."""

    def __init__(self, held: range = range(0), broken: int | None = None) -> None:
        self.asked: list[int] = []
        self.sixth = asyncio.Event()
        self._held = held
        self._broken = broken

    async def ask(self, request: Request, record: Record) -> None:
        self.asked.append(request.index)
        if len(self.asked) == 6:
            self.sixth.set()
        await asyncio.sleep(0)
        if request.index == self._broken:
            raise ValueError("broken")
        if request.index in self._held:
            await asyncio.Event().wait()
        record.add(("x",), 1)


def requests(count: int) -> Iterator[Request]:
    return (Request(number, "", {}, stream=True) for number in range(count))


async def run(client: Fake, kind: str, done: list[Record], places: int = 4) -> None:
    loop = asyncio.get_running_loop()
    if kind == "closed":
        await closed_loop([client] * places, ((request,) for request in requests(8)), done.append)
    else:
        await open_loop([client] * places, ((0.0, request) for request in requests(8)), done.append, started=loop.time())


@pytest.mark.parametrize("kind", ["closed", "open"])
async def test_all_are_answered(kind: str) -> None:
    """In a loop that is not disturbed; no more at a time than there are places."""
    done: list[Record] = []
    await run(Fake(), kind, done)
    assert sorted(record.request.index for record in done) == list(range(8))
    assert {record.outcome for record in done} == {Outcome.ANSWERED}


async def test_a_request_that_waits_for_a_place_counts_from_when_it_was_due() -> None:
    """It is sent later, and the record has both times."""
    done: list[Record] = []
    started = time.perf_counter() - 10  # s; all but the last are late
    due = [0.0, 1.0, 2.0, 10.02]
    pairs = zip(due, requests(4), strict=True)
    await open_loop([Fake()], pairs, done.append, started=started)
    assert [record.due - started for record in done] == pytest.approx(due)
    assert all(record.sent - started >= 10 for record in done)
    assert done[-1].sent >= done[-1].due


async def test_no_request_starts_after_the_end_of_the_load() -> None:
    """Of an open loop, also if it was due before."""
    done: list[Record] = []
    now = time.perf_counter()
    await open_loop([Fake()], zip([0.0, 1.0], requests(2), strict=True), done.append, started=now - 10, until=now)
    assert done == []


@pytest.mark.parametrize("kind", ["closed", "open"])
async def test_what_was_under_way_at_the_end_is_cancelled(kind: str) -> None:
    """As after Ctrl-C: sent requests are answered or cancelled, and the others are not sent any more."""
    done: list[Record] = []
    client = Fake(held=range(2, 6))
    task = asyncio.create_task(run(client, kind, done))
    await client.sixth.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert client.asked == [0, 1, 2, 3, 4, 5]
    assert {record.request.index: record.outcome for record in done} == {
        **dict.fromkeys((0, 1), Outcome.ANSWERED),
        **dict.fromkeys((2, 3, 4, 5), Outcome.CANCELLED),
    }


@pytest.mark.parametrize("kind", ["closed", "open"])
async def test_an_exception_of_a_client_ends_the_loop(kind: str) -> None:
    """At once, although others never end; nothing is left running."""
    done: list[Record] = []
    with pytest.raises(ValueError, match="broken"):
        await run(Fake(held=range(8), broken=1), kind, done)
    assert all(task is asyncio.current_task() for task in asyncio.all_tasks())


async def test_an_open_loop_gives_up_the_rest() -> None:
    """Those that have not ended by then."""
    done: list[Record] = []
    client = Fake(held=range(3, 4))
    await open_loop([client] * 8, ((0.0, request) for request in requests(8)), done.append, started=0.0, give_up=0.0)
    assert not done
    soon = asyncio.get_running_loop().time() + 0.2
    await open_loop([client] * 8, ((0.0, request) for request in requests(8)), done.append, started=0.0, give_up=soon)
    outcomes = {record.request.index: record.outcome for record in done}
    assert outcomes.get(3, Outcome.CANCELLED) is Outcome.CANCELLED


async def test_an_open_loop_has_no_more_in_flight_than_places() -> None:
    """The others wait, and count from when they were due."""
    done: list[Record] = []
    client = Fake(held=range(8))
    now = asyncio.get_running_loop().time()
    timed = ((number / 1e6, request) for number, request in enumerate(requests(8)))
    await open_loop([client] * 6, timed, done.append, started=now - 5.0, give_up=now + 0.2)
    assert len(client.asked) <= 6
    assert all(record.due == now - 5.0 + record.request.index / 1e6 for record in done)
    assert all(record.sent >= now for record in done)
