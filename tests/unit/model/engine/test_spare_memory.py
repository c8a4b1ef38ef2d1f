"""Free memory goes back to the system once many requests have become few."""

from __future__ import annotations

import gc
import threading
import weakref

import psutil

from support.engine_parts import PACE, PROMISED, added, output
from support.fake_reply import fake_job as job
from support.patience import pause
from triton_vllm.engine import spare_memory
from triton_vllm.engine.spare_memory import FEW, MANY, PAUSE_S, SpareMemory, give_back


def test_memory_is_given_back_once_after_many_requests():
    spare = SpareMemory()
    looks = [(0, 0.0), (MANY, 1.0), (FEW, 2.0), (FEW, 1.0 + PAUSE_S), (FEW, 100.0)]
    assert [spare.is_due(*look) for look in looks] == [False, False, False, True, False]


def test_memory_is_not_given_back_while_there_are_more_than_few():
    spare = SpareMemory()
    looks = [(MANY, 0.0), (FEW + 1, 100.0), (MANY, 101.0), (0, 102.0), (0, 101.0 + PAUSE_S)]
    assert [spare.is_due(*look) for look in looks] == [False, False, False, False, True]


def test_the_engine_gives_memory_back(started, monkeypatch):
    given = threading.Event()
    monkeypatch.setattr(spare_memory, "give_back", given.set)
    monkeypatch.setattr(spare_memory, "PAUSE_S", 0.0)
    engine, _ = started()
    many = job()
    many.weight = MANY
    _, put = added(engine, many)
    pause(10 * PACE.health_period)
    assert not given.is_set()
    put(output(finished=True))
    assert given.wait(PROMISED)


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
