"""Cancelled requests are noticed within 100 ms by a thread that sleeps when nothing is in flight."""

from __future__ import annotations

import threading
import time

from triton_vllm.delivery.watch import LONGEST_S, CancellationWatch
from triton_vllm.job import Job


def job():
    return Job(None, None, None, None)


def test_a_cancelled_job_is_found_in_time_and_others_are_left_alone():
    """From the client's cancellation to ours: at most 100 ms."""
    jobs = [job() for _ in range(50)]
    gone: set[str] = set()
    found: list[Job] = []
    event = threading.Event()

    def cancel(j):
        found.append(j)
        j.closed = True
        event.set()

    watch = CancellationWatch(lambda: jobs, lambda j: j.id in gone, cancel)
    watch.wake()
    time.sleep(0.12)
    began = time.monotonic()
    gone.add(jobs[7].id)
    assert event.wait(1)
    assert time.monotonic() - began < 0.1
    watch.close()
    assert found == [jobs[7]]


def test_no_question_is_asked_about_a_job_once_it_closes():
    """The server crashes when asked about a request whose final response is out: closing waits for a running question."""
    j = job()
    asking, answer = threading.Event(), threading.Event()
    order: list[str] = []

    def is_cancelled(_):
        asking.set()
        answer.wait(5)
        order.append("answered")
        return False

    watch = CancellationWatch(lambda: [j], is_cancelled, lambda _: None)
    watch.wake()
    assert asking.wait(5)
    closer = threading.Thread(target=lambda: (j.close(), order.append("closed")))
    closer.start()
    time.sleep(0.05)
    assert order == []
    answer.set()
    closer.join(5)
    time.sleep(0.2)
    watch.close()
    assert order == ["answered", "closed"]


def test_an_idle_watch_asks_nothing_until_woken():
    """With no request in flight there is no polling."""
    calls = []
    watch = CancellationWatch(lambda: calls.append(1) or [], lambda _: False, lambda _: None)
    time.sleep(0.2)
    assert calls == []
    watch.wake()
    time.sleep(0.2)
    assert len(calls) == 1
    watch.close()


def test_a_late_answer_costs_other_requests_a_second_at_most_and_an_unload_nothing():
    """After a question that took 0.5 s the next comes within about a second, and closing does not wait for that."""
    times: list[float] = []

    def is_cancelled(_):
        times.append(time.monotonic())
        if len(times) == 1:
            time.sleep(0.5)
        return False

    jobs = [job()]
    watch = CancellationWatch(lambda: jobs, is_cancelled, lambda _: None)
    watch.wake()
    while len(times) < 2:
        time.sleep(0.01)
    assert times[1] - times[0] < 0.5 + LONGEST_S + 0.3
    times.clear()
    while not times:
        time.sleep(0.01)
    time.sleep(0.55)
    began = time.monotonic()
    watch.close()
    assert time.monotonic() - began < 0.3
