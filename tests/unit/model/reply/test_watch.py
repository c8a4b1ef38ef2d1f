"""Cancelled requests are noticed within 100 ms by a thread that sleeps when nothing is in flight.

What takes time here takes it on a clock that the tests move themselves; the thread's own tests assert order, not duration.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from support.fake_log import FakeLog
from support.fake_reply import FakeChannel, fake_reply
from support.patience import LIMIT
from triton_vllm.base.errors import CancelledError
from triton_vllm.engine.job import Job
from triton_vllm.reply.watch import FEW, PERIOD_S, PREPARE_S, CancellationWatch, Departure

QUESTION_S = 60e-6  # a round trip to the server


def job_of(channel):
    return Job(fake_reply(channel))


class Clock:
    """Stands still unless moved."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Timed(FakeChannel):
    """A channel whose questions take their time on a clock."""

    def __init__(self, clock, cost=QUESTION_S):
        super().__init__()
        self.clock, self.cost = clock, cost

    def is_cancelled(self):
        self.clock.now += self.cost
        return super().is_cancelled()


@pytest.fixture
def clock():
    return Clock()


def watched(clock, number, cost=QUESTION_S):
    """Return a watch that is driven by hand, the channels of its jobs, and what it cancels."""
    channels = [Timed(clock, cost) for _ in range(number)]
    jobs = [job_of(channel) for channel in channels]
    found: list[Any] = []
    return CancellationWatch(lambda: jobs, found.append, FakeLog(), clock=clock), channels, jobs, found


def test_a_cancelled_job_is_found_and_others_are_left_alone(clock):
    """Only the job whose client has left is cancelled, once, and nothing more is asked about it."""
    watch, channels, jobs, found = watched(clock, 50)
    watch.look()
    assert found == []
    channels[7].cancelled = True
    watch.look()
    watch.look()
    assert found == [jobs[7]]
    assert [channel.asked for channel in channels] == [2 if i == 7 else 3 for i in range(50)]


def test_a_look_begins_every_50_ms_with_48_in_flight(clock):
    """So a client that leaves just after it was asked about is noticed 60 ms later at most."""
    watch, *_ = watched(clock, 48)
    _, pause = watch.look()
    assert clock.now + pause == pytest.approx(PERIOD_S)


def test_asking_takes_no_more_than_a_twentieth_of_the_time(clock):
    """With 256 in flight the looks are further apart: asking would cost more than answering; about a few it costs little."""
    watch, *_ = watched(clock, 256)
    _, pause = watch.look()
    own = clock.now * (256 - FEW) / 256
    assert own / (own + pause) == pytest.approx(0.05)
    assert pause > PERIOD_S


def test_a_closed_reply_is_not_asked_about(clock):
    """It keeps neither the server nor the watch busy. Its job goes on for nobody, as after a failed send, and is ended."""
    watch, channels, jobs, found = watched(clock, 2)
    jobs[0].delivery.send([], final=True)
    assert watch.look()[0] is True
    assert [channel.asked for channel in channels] == [0, 1]
    jobs[1].delivery.fail(CancelledError("Request was cancelled"))
    assert watch.look()[0] is False
    assert [channel.asked for channel in channels] == [0, 1]
    assert found == [jobs[0], *jobs]


class Counting(FakeChannel):
    """Lets a test wait for the questions of the watch's thread."""

    def __init__(self):
        super().__init__()
        self.questions = threading.Semaphore(0)

    def is_cancelled(self):
        self.questions.release()
        return super().is_cancelled()


def test_the_thread_asks_nothing_until_woken_then_until_the_reply_closes():
    """With no request in flight there is no polling; with one, the thread asks again and again by itself."""
    channel, looked = Counting(), threading.Semaphore(0)
    job = job_of(channel)

    def jobs():
        looked.release()
        return [job]

    watch = CancellationWatch(jobs, lambda _: None, FakeLog())
    watch.start()
    assert not looked.acquire(timeout=2 * PERIOD_S)
    watch.wake()
    for _ in range(3):
        assert channel.questions.acquire(timeout=LIMIT)
    job.delivery.send([], final=True)
    while looked.acquire(blocking=False):
        pass
    watch.wake()
    assert looked.acquire(timeout=LIMIT)  # so the look that was under way, which may have asked, is over
    asked = channel.asked
    watch.wake()
    assert looked.acquire(timeout=LIMIT)
    watch.close()
    assert channel.asked == asked


class Broken(FakeChannel):
    """The server cannot be asked about this request: shared memory is full, say."""

    def is_cancelled(self):
        raise RuntimeError("injected")


def test_a_question_that_fails_keeps_nobody_from_being_asked_about():
    """The jobs after it are watched as before, and the log has it once."""
    log, given_up = FakeLog(), FakeChannel()
    given_up.cancelled = True
    jobs = [job_of(Broken()), job_of(given_up)]
    found: list[Any] = []
    watch = CancellationWatch(lambda: jobs, found.append, log)
    assert watch.look()[0] is True
    watch.look()
    assert found == [jobs[1]]
    assert len(log.errors) == 1


def test_an_exception_does_not_end_the_watch():
    """The thread goes on by itself: no request need come for those in flight to be watched again."""
    log, cancelled, failures = FakeLog(), threading.Event(), iter([RuntimeError("injected")] * 3)
    channel = FakeChannel()
    channel.cancelled = True
    job = job_of(channel)

    def jobs():
        for failure in failures:
            raise failure
        return [job]

    watch = CancellationWatch(jobs, lambda _: cancelled.set(), log)
    watch.start()
    watch.wake()
    assert cancelled.wait(LIMIT)
    watch.close()
    assert len(log.errors) == 1
    assert "injected" in log.errors[0]


def test_the_server_is_asked_twice_a_second_whether_it_ends_and_only_while_a_request_is_open(clock):
    """Each question is a round trip; the first answer that it does is told once."""
    asked, told = [], []
    ends: list[bool] = []
    departure = Departure(lambda: asked.append(clock.now) or bool(ends), lambda: told.append(clock.now), clock)
    job = job_of(FakeChannel())
    watch = CancellationWatch(lambda: [job], lambda _: None, FakeLog(), departure, clock)
    for clock.now in (0.0, 0.25, 0.49, 0.5, 0.75):
        watch.look()
    assert (asked, told) == ([0.0, 0.5], [])
    ends.append(True)
    for clock.now in (2.0, 3.0, 4.0):
        watch.look()
    assert (asked, told) == ([0.0, 0.5, 2.0], [2.0])
    job.delivery.send([], final=True)
    departure._next = 0.0
    watch.look()
    assert len(asked) == 3


def test_the_question_is_prepared_while_no_request_is_open():
    """The server may be told to end a moment after its first request; what answers the question must then be known."""
    prepared: list[int] = []
    found, ended = threading.Event(), threading.Event()

    def prepare():
        prepared.append(len(prepared))
        if len(prepared) == 3:
            found.set()
        return found.is_set()

    departure = Departure(lambda: True, ended.set, prepare=prepare)
    assert departure.prepare() == PREPARE_S
    watch = CancellationWatch(lambda: [job_of(FakeChannel())], lambda _: None, FakeLog(), departure)
    watch.start()
    assert found.wait(LIMIT)
    assert not ended.is_set()
    watch.wake()
    assert ended.wait(LIMIT)
    watch.close()
    assert len(prepared) == 3
