"""A call to the server that does not return takes only its own request with it."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from support.fake_log import FakeLog
from support.fake_reply import FakeChannel, fake_reply
from support.patience import LIMIT, pause, wait_for
from triton_vllm.base.errors import InternalError, StoppedError
from triton_vllm.reply.deliver import deliver
from triton_vllm.reply.endings import Endings
from triton_vllm.reply.outbox import Outbox
from triton_vllm.reply.reply import NOT_SENT, Reply
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


class Unanswered(FakeChannel):
    """A channel whose questions get no answer until a test gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.may_return = threading.Event(), threading.Event()

    def is_cancelled(self) -> bool:
        self.entered.set()
        assert self.may_return.wait(LIMIT)
        return super().is_cancelled()


def send(reply: Any, items: Any) -> None:
    """Send what a test has put."""
    reply.send(items, final=items[-1] == "end")


class Place:
    """An outbox with one thread, its watch, which looks when a test says so, and how often it has told."""

    def __init__(self, work: Any = send) -> None:
        self.log = FakeLog()
        self.outbox = Outbox(work, self.log)
        self.outbox.start()
        self.told = 0
        self.is_stopped = False
        self.watch = StuckWatch(self.outbox.workers(), self.tell, self.log, lambda: self.is_stopped)

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


def test_a_call_that_returns_while_it_is_given_up_is_not_given_up(place, monkeypatch):
    """Either the sender knows that its request was closed, or the request stays open.

    The sequence that lost the end of a request: (1) the watch sees that a call lasts; (2) the call returns, and the sender
    sees that its reply is open; (3) the watch closes the reply and starts another sender; (4) the first sender ends, and the
    others drop what comes for a closed reply.
    """
    channel = Blocked()
    reply = fake_reply(channel, lane=place.outbox.lane())
    reply.put("a")
    assert channel.entered.wait(LIMIT)
    abandon = Reply.abandon

    def abandon_late(self: Reply, *call: Any) -> Any:
        channel.may_return.set()
        wait_for(lambda: self.call is None, "the end of the call")
        pause(0.05)  # a sender that looks only once has looked by now
        return abandon(self, *call)

    monkeypatch.setattr(Reply, "abandon", abandon_late)
    place.looks(LOOKS + 1)
    reply.end("end")
    wait_for(lambda: channel.sent[-1][1], "the end of the request", limit=10)
    assert channel.sent == [(["a"], False), (["end"], True)]


@pytest.mark.parametrize(
    ("broken", "items", "sent"),
    [
        ([RuntimeError("injected")], [], ["unloaded"]),
        ([], ["a"], ["['a']", NOT_SENT]),
    ],
    ids=["the call raises", "the call returns"],
)
def test_a_request_that_was_given_up_before_its_error_has_one_end(broken, items, sent):
    """The response in front of the error may be one without content, whose failure is no reason to leave the error out."""
    channel = Blocked()
    channel.broken = broken
    reply = fake_reply(channel, streams=True)
    sender = threading.Thread(target=deliver, args=(FakeLog(), reply, [*items, StoppedError("unloaded")]))
    sender.start()
    assert channel.entered.wait(LIMIT)
    assert reply.abandon(reply.call)
    channel.may_return.set()
    sender.join(LIMIT)
    assert [str(one) for one, _ in channel.sent] == sent
    assert [last for _, last in channel.sent] == [*([False] * len(items)), True]


@pytest.mark.parametrize("last", ["an answer", "an error", "a failed response", "a bulky answer"])
def test_a_question_that_gets_no_answer_keeps_only_its_own_request(last):
    """The end of a request waits while the watch asks about its client; before a bulky answer the sender itself asks."""
    place = Place(partial(deliver, FakeLog()))
    bulky, sent = last == "a bulky answer", "[namespace(finished=True)]"
    end: Any = SimpleNamespace(finished=True)
    channel, other = Unanswered(), FakeChannel()
    lane = place.outbox.lane(bulky=bulky)
    reply = fake_reply(channel, lane=lane, bulky=bulky)
    asker = threading.Thread(target=reply.is_cancelled)
    if not bulky:
        asker.start()
        assert channel.entered.wait(LIMIT)
    if last == "an error":
        end, sent = InternalError("failed"), "failed"
    elif last == "a failed response":
        channel.broken = [RuntimeError("injected")]
        end, sent = SimpleNamespace(finished=False), NOT_SENT
    reply.put(end)
    fake_reply(other, lane=lane).put(SimpleNamespace(finished=True))
    try:
        wait_for(lambda: place.looks(1) or place.told, "the watch's word")
        wait_for(lambda: other.sent, "the answer to the request behind it")
        assert channel.sent == []
    finally:
        channel.may_return.set()
        wait_for(lambda: channel.sent, "the end of the request")
        place.outbox.close()
    assert place.told == 1
    assert [(str(one), final) for one, final in channel.sent] == [(sent, True)]


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


def test_a_server_that_stands_still_takes_no_time(place):
    """In a debugger, for example. Once it goes on, a call has as long as at first."""
    channel = blocked(place)
    place.looks(LOOKS)
    place.is_stopped = True
    place.looks(2 * LOOKS)
    place.is_stopped = False
    place.looks(LOOKS)
    assert place.told == 0
    place.looks(1)
    assert place.told == 1
    channel.may_return.set()


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
