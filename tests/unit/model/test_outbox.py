"""The outbox loses nothing, keeps the order and merges only under pressure."""

from __future__ import annotations

import random
import sys
import threading
import time

from support.fake_reply import fake_job as job
from triton_vllm.delivery.outbox import Outbox


def test_everything_arrives_in_order_from_many_producers():
    """2,000 outputs for each of 20 requests over three threads arrive once each and in order."""
    got: dict[str, list[int]] = {}
    outbox = Outbox(lambda j, items: got.setdefault(j.id, []).extend(items), threads=3)
    jobs = [job() for _ in range(20)]
    for j in jobs:
        outbox.assign(j)
    for i in range(2000):
        for j in jobs:
            outbox.put(j, i)
    outbox.close()
    assert all(got[j.id] == list(range(2000)) for j in jobs)


def test_one_output_a_response_at_light_load_and_several_under_pressure():
    """An idle sender passes each output on; what comes while it is in a send goes out together with the next."""
    sent: list[list[int]] = []
    entered, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def deliver(_, items):
        sent.append(items)
        entered.release()
        go_on.acquire()

    outbox = Outbox(deliver)
    j = job()
    outbox.assign(j)
    outbox.put(j, 1)
    entered.acquire()  # the sender is in its handshake now
    for item in (2, 3, 4):
        outbox.put(j, item)
    go_on.release()
    entered.acquire()
    go_on.release()
    outbox.put(j, 5)
    entered.acquire()
    go_on.release()
    outbox.close()
    assert sent == [[1], [2, 3, 4], [5]]


def test_a_closed_job_gets_nothing_more():
    """After the final response, or a failed one, nothing follows."""
    sent = []

    def deliver(j, items):
        sent.extend(items)
        j.reply.send([], final=True)

    outbox = Outbox(deliver)
    j = job()
    outbox.assign(j)
    outbox.put(j, 1)
    while not j.reply.closed:
        pass
    outbox.put(j, 2)
    outbox.close()
    assert sent == [1]


def test_many_streams_are_merged_and_the_last_output_does_not_wait():
    """64 streams whose sends take 1 ms: far fewer sends than outputs, all in order, and an end is sent at once."""
    got: dict[str, list[int]] = {}
    ends: dict[str, float] = {}
    sends = 0

    def deliver(j, items):
        nonlocal sends
        sends += 1
        time.sleep(0.001)
        got.setdefault(j.id, []).extend(items)
        if j.ended and items[-1] == 99:
            j.reply.send([], final=True)
            ends[j.id] = time.monotonic()

    outbox = Outbox(deliver)
    jobs = [job() for _ in range(64)]
    for j in jobs:
        outbox.assign(j)
    for i in range(100):
        time.sleep(0.002)
        for j in jobs:
            j.ended = i == 99
            outbox.put(j, i)
    outbox.close()
    assert all(got[j.id] == list(range(100)) for j in jobs)
    assert sends < 64 * 100 / 5
    assert len(ends) == 64


def test_a_single_stream_is_not_merged():
    """One stream with a token every 6 ms and sends of 3 ms, as on a busy machine: each output is a response of its own."""
    sent: list[list[int]] = []

    def deliver(_, items):
        time.sleep(0.003)
        sent.append(items)

    outbox = Outbox(deliver)
    j = job()
    outbox.assign(j)
    for i in range(100):
        outbox.put(j, i)
        time.sleep(0.006)
    outbox.close()
    assert [i for items in sent for i in items] == list(range(100))
    assert (
        len(sent) >= 80
    )  # a busy machine may hold the thread up now and then; paced like many streams it would be half


def test_what_comes_during_a_pause_goes_out_by_itself():
    """Outputs that do not wake the sender are sent when the pause is over, though nothing follows them."""
    seed = random.Random(3)
    sent: dict[str, list[int]] = {}
    outbox = Outbox(lambda j, items: sent.setdefault(j.id, []).extend(items))
    jobs = [job() for _ in range(64)]
    for j in jobs:
        outbox.assign(j)
        outbox.put(j, 0)
    for i in range(1, 60):
        for j in jobs:
            outbox.put(j, i)
        time.sleep(seed.choice((0, 0, 0.001, 0.02)))
        if i % 10 == 0:
            limit = time.monotonic() + 5
            while any(sent[j.id][-1] != i for j in jobs) and time.monotonic() < limit:
                time.sleep(0.001)
            assert {sent[j.id][-1] for j in jobs} == {i}
    outbox.close()
    assert all(sent[j.id] == list(range(60)) for j in jobs)


def test_streams_are_paced_where_the_sender_would_keep_up():
    """64 streams, sends of a sixth of a millisecond: time for each output by itself, yet they are merged."""
    sends = 0

    def deliver(_, items):
        nonlocal sends
        sends += 1
        time.sleep(0.0001)

    outbox = Outbox(deliver)
    jobs = [job() for _ in range(64)]
    for j in jobs:
        outbox.assign(j)
    for i in range(40):
        for j in jobs:
            outbox.put(j, i)
        time.sleep(0.02)
    outbox.close()
    assert sends < 64 * 40 / 2


def test_no_output_is_left_behind_when_the_sender_goes_to_sleep():
    """Each output comes just as the sender has nothing left to do; one that it overlooks would wait for ever."""
    sent = threading.Semaphore(0)
    outbox = Outbox(lambda *_: sent.release())
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for number in range(5000):
            j = job()
            outbox.assign(j)
            outbox.put(j, number)
            assert sent.acquire(timeout=5)
    finally:
        sys.setswitchinterval(interval)
        outbox.close()
