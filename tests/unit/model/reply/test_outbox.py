"""The outbox loses nothing, keeps the order and merges only under pressure.

How much it merges depends on what a send costs: those tests run a lane by hand, on a clock that only they move.
"""

from __future__ import annotations

import itertools
import random
import sys
import threading
from typing import Any

import pytest

from support.fake_log import FakeLog
from support.fake_reply import FakeChannel, fake_reply
from support.patience import LIMIT, pause, wait_for
from triton_vllm.reply.outbox import CORES_TO_SPARE, FEW_CORES, ONE_BY_ONE, Outbox

LONGEST_S = FEW_CORES.longest


def reply_of(outbox, channel=None, *, bulky=False) -> Any:
    """Return a reply whose items are what a test puts."""
    return fake_reply(channel, lane=outbox.lane(bulky=bulky), bulky=bulky)


def started(deliver, threads=1, log=None) -> Any:
    outbox = Outbox(deliver, log or FakeLog(), threads)
    outbox.start()
    return outbox


def test_ends_that_wait_come_when_it_is_closed():
    """Also those that the lanes put while they send their last outputs."""
    ended: list[int] = []

    def deliver(reply, items):
        outbox.later()(lambda: ended.append(items[-1]), 3600.0)

    outbox = started(deliver, threads=2)
    for number in range(8):
        reply_of(outbox).put(number)
    outbox.close()
    assert sorted(ended) == [*range(8)]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_bulky_response_keeps_nobody_waiting(threads):
    """It is written in a thread of its own kind; the others go on meanwhile."""
    sent, begun, go_on, others = [], threading.Event(), threading.Event(), threading.Semaphore(0)

    def deliver(reply, items):
        if reply.bulky:
            begun.set()
            assert go_on.wait(LIMIT)
        sent.append((reply.bulky, items))
        others.release()

    outbox = started(deliver, threads)
    reply_of(outbox, bulky=True).put(0)
    assert begun.wait(LIMIT)
    for _ in range(2 * threads):
        reply_of(outbox).put(1)
    for _ in range(2 * threads):
        assert others.acquire(timeout=LIMIT)
    go_on.set()
    outbox.close()
    assert sent == [*[(False, [1])] * (2 * threads), (True, [0])]


def test_what_comes_during_a_pause_goes_out_by_itself():
    """Outputs that do not wake the sender are sent when the pause is over, though nothing follows them."""
    seed = random.Random(3)
    sent: dict[int, list[int]] = {}
    outbox = started(lambda reply, items: sent.setdefault(id(reply), []).extend(items))
    replies = [reply_of(outbox) for _ in range(64)]
    for reply in replies:
        reply.put(0)
    for i in range(1, 60):
        for reply in replies:
            reply.put(i)
        pause(seed.choice((0, 0, 0.001, 0.02)))
        if i % 10 == 0:
            wait_for(lambda i=i: {sent.get(id(reply), [-1])[-1] for reply in replies} == {i}, f"output {i} of each reply")
    outbox.close()
    assert all(sent[id(reply)] == list(range(60)) for reply in replies)


def test_no_output_is_left_behind_when_the_sender_goes_to_sleep():
    """Each output comes just as the sender has nothing left to do; one that it overlooks would wait for ever."""
    sent = threading.Semaphore(0)
    outbox = started(lambda *_: sent.release())
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for number in range(5000):
            reply_of(outbox).put(number)
            assert sent.acquire(timeout=LIMIT)
    finally:
        sys.setswitchinterval(interval)
        outbox.close()


def test_a_sender_wakes_from_the_shortest_sleep():
    """Until Python 3.12, `queue.SimpleQueue.get` waits for ever now and then if its timeout is over before it begins to wait."""
    lane = Outbox(lambda *_: None, FakeLog(), clock=lambda: 0.0)._lanes[0]

    def sleep() -> None:
        for _ in range(40_000):
            lane._wakes_at = 1.0
            lane._ring()
            lane._sleep(1.0)
            lane._sleep(1e-9)

    thread = threading.Thread(target=sleep, daemon=True)
    thread.start()
    thread.join(LIMIT)
    assert not thread.is_alive()


def test_an_exception_does_not_end_the_sender():
    """The reply that it met is answered, those behind it are served, and the log has it once however often it comes."""
    log, sent = FakeLog(), threading.Semaphore(0)

    def deliver(reply, items):
        if items == ["bad"]:
            raise KeyError("injected")
        sent.release()

    outbox = started(deliver, log=log)
    channels = [FakeChannel() for _ in range(3)]
    for channel in channels:
        reply_of(outbox, channel).put("bad")
    good = reply_of(outbox)
    good.put("good")
    assert sent.acquire(timeout=LIMIT)
    good.put("better")  # also after it has slept
    assert sent.acquire(timeout=LIMIT)
    outbox.close()
    assert [len(channel.sent) for channel in channels] == [1, 1, 1]
    assert len(log.errors) == 1
    assert "injected" in log.errors[0]


class Bench:
    """A lane without its thread: time passes only where a test or a send lets it.

    Args:
        cost: seconds that a send takes.
        streams: how many replies there are.
        pacing: how responses wait.
    """

    def __init__(self, cost, streams, pacing=FEW_CORES):
        self.now = 1.0
        self.cost = cost
        self.got: list[list[Any]] = [[] for _ in range(streams)]
        self.sends: list[tuple[float, int]] = []  # when, whose
        self.outbox = Outbox(self.deliver, FakeLog(), pacing=pacing, clock=lambda: self.now)
        self.lane = self.outbox._lanes[0]
        self.replies = [reply_of(self.outbox) for _ in range(streams)]

    def deliver(self, reply, items):
        self.now += self.cost
        number = self.replies.index(reply)
        self.sends.append((self.now, number))
        self.got[number].extend(items)
        if reply.complete:
            reply.send([], final=True)

    def put_all(self, item):
        for reply in self.replies:
            reply.put(item)

    def run_until(self, end):
        """Do what the thread does until `end`."""
        while (due := self.lane.turn()) <= end:
            self.now = max(self.now, due)
        self.now = max(self.now, end)


def test_many_streams_are_merged_and_the_last_output_does_not_wait():
    """64 streams whose sends take 1 ms: far fewer sends than outputs, all in order, and an end is sent at once."""
    bench = Bench(cost=0.001, streams=64)
    for i in range(99):
        bench.put_all(i)
        bench.run_until(bench.now + 0.002)
    for reply in bench.replies:
        reply.end(99)
    before = bench.now
    bench.lane.turn()
    assert bench.now - before == pytest.approx(64 * bench.cost)
    assert bench.got == [list(range(100))] * 64
    assert len(bench.sends) < 64 * 100 / 5


def test_nothing_is_merged_where_that_is_not_wanted():
    """64 streams whose outputs come faster than they can be sent: each is a response of its own, in order."""
    bench = Bench(cost=0.001, streams=64, pacing=ONE_BY_ONE)
    for i in range(10):
        bench.put_all(i)
        bench.run_until(bench.now + 0.002)
    assert bench.got == [list(range(10))] * 64
    assert len(bench.sends) == 640


def test_a_single_stream_is_not_merged():
    """One stream with a token every 6 ms and sends of 3 ms, as on a busy machine: each output is a response of its own."""
    bench = Bench(cost=0.003, streams=1)
    for i in range(100):
        bench.put_all(i)
        bench.run_until(bench.now + 0.003)
    assert bench.got == [list(range(100))]
    assert len(bench.sends) == 100


def test_streams_that_have_ended_slow_down_no_other():
    """After 64 streams, each output of a single one is a response of its own."""
    bench = Bench(cost=0.003, streams=65)
    *others, single = bench.replies
    for reply in others:
        reply.put(0)
    bench.run_until(bench.now)
    for reply in others:
        reply.end(1)
    bench.run_until(bench.now)
    for i in range(100):
        single.put(i)
        bench.run_until(bench.now + 0.003)
    assert bench.got == [[0, 1]] * 64 + [list(range(100))]
    assert len(bench.sends) == 2 * 64 + 100


def test_answers_of_one_response_are_no_streams():
    """After 64 whole answers, the outputs of 64 streams are merged as without these answers."""
    bench = Bench(cost=0.001, streams=128)
    for reply in bench.replies[64:]:
        reply.end(0)
    bench.run_until(bench.now)
    for i in range(100):
        for reply in bench.replies[:64]:
            reply.put(i)
        bench.run_until(bench.now + 0.002)
    assert len(bench.sends) < 64 + 64 * 100 / 5


@pytest.mark.parametrize(("streams", "step", "merged"), [(16, 0.0058, False), (128, 0.0155, False), (128, 0.003, True)])
def test_with_cores_to_spare_nothing_waits(streams, step, merged):
    """A Llama-7B's 32 and 256 streams over two threads, then steps for which one cannot send fast enough."""
    bench = Bench(30e-6, streams, pacing=CORES_TO_SPARE)
    began = bench.now
    for i in range(100):
        if bench.now < began + i * step:
            bench.run_until(began + i * step)
        bench.put_all(i)
    bench.run_until(bench.now)
    assert bench.got == [list(range(100))] * streams
    assert (len(bench.sends) < 85 * streams) if merged else (len(bench.sends) == 100 * streams)


def test_no_stream_pauses_longer_than_a_reader_bears():
    """256 streams whose sends take 5 ms: two responses of a request are 80 ms apart, and the time that the sends take."""
    bench = Bench(cost=0.005, streams=256)
    for i in range(200):
        bench.put_all(i)
        bench.run_until(bench.now + 0.02)
    own = [at for at, number in bench.sends if number == 0]
    assert max(b - a for a, b in itertools.pairwise(own)) < LONGEST_S + 256 * bench.cost + 0.02
