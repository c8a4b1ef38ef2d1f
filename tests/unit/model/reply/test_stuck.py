"""A call to the server that does not return takes only its own request with it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from support.fake_log import FakeLog
from support.fake_reply import FakeChannel, fake_reply
from support.patience import LIMIT, wait_for
from triton_vllm.reply.endings import Endings
from triton_vllm.reply.outbox import Outbox
from triton_vllm.reply.reply import NOT_SENT
from triton_vllm.reply.stuck import LOOKS, StuckWatch


class Blocked(FakeChannel):
    """A channel whose sends do not return until a test lets them."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.may_return = threading.Event(), threading.Event()

    def send(self, tensors, *, final, whole=False) -> None:
        self.entered.set()
        assert self.may_return.wait(LIMIT)
        super().send(tensors, final=final, whole=whole)


def send(reply: Any, items: Any) -> None:
    """Send what a test has put."""
    reply.send(items, final=items[-1] == "end")


class Place:
    """An outbox with one thread, its watch, which looks when a test says so, and how often it has told."""

    def __init__(self) -> None:
        self.log = FakeLog()
        self.outbox = Outbox(send, self.log)
        self.outbox.start()
        self.told = 0
        self.watch = StuckWatch(self.outbox.workers(), self.tell, self.log)

    def tell(self) -> None:
        self.told += 1

    def looks(self, count: int) -> None:
        for _ in range(count):
            self.watch.look()

    def put(self, channel: FakeChannel, *items: Any) -> None:
        reply = fake_reply(channel, lane=self.outbox.lane())
        for item in items:
            (reply.end if item == "end" else reply.put)(item)


@pytest.fixture
def place():
    place = Place()
    yield place
    place.outbox.close()


def blocked(place, item="a") -> Blocked:
    channel = Blocked()
    place.put(channel, item)
    assert channel.entered.wait(LIMIT)
    return channel


def test_the_requests_behind_one_that_blocks_are_served_by_another_thread(place):
    """It is told once, only when the call has been seen so often; the next one that blocks is replaced sooner."""
    stuck, other = blocked(place), FakeChannel()
    place.put(other, "a", "end")
    place.looks(LOOKS)
    assert (place.told, other.sent) == (0, [])
    place.looks(1)
    assert place.told == 1
    wait_for(lambda: other.sent and other.sent[-1][1], "the end of the other request")
    second, third = blocked(place), FakeChannel()
    place.put(third, "end")
    place.looks(2)
    wait_for(lambda: third.sent, "an answer behind the second")
    assert place.told == 1
    assert stuck.sent == second.sent == []
    for channel in (stuck, second):
        channel.may_return.set()


def test_a_call_that_returns_after_all_ends_its_request(place):
    """Its client has got a part of the answer and waits; another thread has the lane now."""
    stuck = blocked(place)
    place.looks(LOOKS + 1)
    stuck.may_return.set()
    wait_for(lambda: len(stuck.sent) == 2, "the end of the request")
    assert (str(stuck.sent[1][0]), stuck.sent[1][1]) == (NOT_SENT, True)
    (sender,) = {one for one in threading.enumerate() if one.name == "triton-send-0" and one is place.outbox._lanes[0].thread}
    assert sender.is_alive()


def test_a_last_response_that_returns_after_all_is_the_last(place):
    """No error follows it."""
    stuck = blocked(place, "end")
    place.looks(LOOKS + 1)
    stuck.may_return.set()
    wait_for(lambda: stuck.sent, "the response")
    other = FakeChannel()
    place.put(other, "end")
    wait_for(lambda: other.sent, "another answer")
    assert stuck.sent == [(["end"], True)]


def test_calls_that_return_are_not_taken_for_one(place):
    """Each look finds the thread in a call, and each time in another one."""
    for _ in range(LOOKS + 2):
        channel = blocked(place)
        place.looks(1)
        channel.may_return.set()
        wait_for(lambda channel=channel: channel.sent, "the response")
    assert place.told == 0


def test_an_end_that_blocks_keeps_only_its_own_request(place):
    """A client waits for the final flag as for anything else."""
    entered, may_return, came = threading.Event(), threading.Event(), threading.Event()

    def never() -> None:
        entered.set()
        assert may_return.wait(LIMIT)

    endings = Endings(place.log, "triton-end")
    endings.start()
    watch = StuckWatch([endings], place.tell, place.log)
    endings.put(never, 0.0)
    assert entered.wait(LIMIT)
    endings.put(came.set, 0.0)
    for _ in range(LOOKS + 1):
        watch.look()
    assert came.wait(LIMIT)
    assert place.told == 1
    may_return.set()
    endings.close()


def test_the_watch_looks_by_itself():
    """In a thread of its own, until it is closed."""
    place = Place()
    place.watch = StuckWatch(place.outbox.workers(), place.tell, place.log, period_s=0.01)
    place.watch.start()
    stuck = blocked(place)
    wait_for(lambda: place.told, "the watch's word")
    place.watch.close()
    stuck.may_return.set()
    place.outbox.close()
