"""Free memory goes back to the system once many requests have become few."""

from __future__ import annotations

import gc
import threading
import weakref

import psutil

from support.engine_parts import PACE, PROMISED, added, output
from support.fake_reply import fake_job as job
from support.patience import pause, wait_for
from triton_vllm import vllm_api
from triton_vllm.engine import spare_memory
from triton_vllm.engine.spare_memory import MANY, PAUSE_S, SpareMemory, give_back


def looks(*requests_and_times: tuple[int, float]) -> list[bool]:
    """Look at the number of requests at each of these times; return when it was time to give memory back."""
    spare = SpareMemory()
    return [spare.is_due(*look) for look in requests_and_times]


def test_memory_is_given_back_once_after_many_requests():
    assert looks((0, 10.0), (MANY, 11.0), (1, 12.0), (0, 13.0), (0, 12.0 + PAUSE_S), (0, 100.0)) == [False] * 4 + [True, False]


def test_no_memory_is_given_back_while_there_are_requests():
    assert looks((MANY, 0.0), (1, 100.0), (0, 101.0), (1, 104.0), (0, 108.0), (0, 109.0)) == [False] * 5 + [True]


def test_few_requests_leave_little_to_give_back():
    assert looks((MANY - 1, 0.0), (0, 100.0)) == [False, False]


def test_the_engine_gives_memory_back(started, monkeypatch):
    given, forgotten = threading.Event(), threading.Event()
    monkeypatch.setattr(spare_memory, "give_back", given.set)
    monkeypatch.setattr(vllm_api, "forget_texts", forgotten.set)
    monkeypatch.setattr(spare_memory, "PAUSE_S", PACE.health_period)
    engine, _ = started()
    _, put = added(engine, job(n=MANY))
    wait_for(lambda: engine._spare_memory.had_many)
    pause(10 * PACE.health_period)
    assert not given.is_set()
    assert not forgotten.is_set()
    put(output(finished=True))
    assert given.wait(PROMISED)
    assert forgotten.is_set()


def test_free_memory_of_the_c_library_is_given_back():
    """What lies at its end would hold all of it."""
    pieces = [bytes(1000) for _ in range(100_000)]
    last = pieces.pop()
    pieces.clear()
    held = psutil.Process().memory_info().rss
    give_back()
    assert held - psutil.Process().memory_info().rss > 50e6
    assert last


def test_what_only_a_full_collection_frees_is_given_back():
    class Loop:
        itself: object = None

    loop = Loop()
    loop.itself = loop
    gone = weakref.ref(loop)
    gc.collect()
    del loop
    give_back()
    assert gone() is None
