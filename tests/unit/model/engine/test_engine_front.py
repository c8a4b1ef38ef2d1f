"""Another API over the engine: it gets each engine, and takes no more requests before the engine ends."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from support.engine_parts import Llm
from support.patience import wait_for


class Front:
    """Notes what it is told, and in which thread engines start."""

    def __init__(self):
        self.told: list[str] = []
        self.engines: list[Llm] = []
        self.fails = 0

    async def use(self, llm, tasks):
        if self.fails:
            self.fails -= 1
            raise RuntimeError("no port")
        self.engines.append(llm)
        self.told.append(f"use {', '.join(tasks)}")

    def leave(self):
        self.told.append("leave")

    async def close(self):
        self.told.append(f"close, {'ended' if self.engines[-1].closed else 'running'}")


def test_a_front_that_cannot_serve_says_so(started):
    """The engine still runs, so that it can be ended in order."""
    engine, _ = started()
    front = Front()
    front.fails = 1
    with pytest.raises(RuntimeError, match="no port"):
        engine.attach(front)
    assert engine.jobs.is_up()


def test_the_next_engine_starts_beside_the_loop(started, monkeypatch):
    """So that the front can say meanwhile that there is none; and it gets that engine, in as many attempts as it takes."""
    engine, _ = started()
    front = Front()
    engine.attach(front)
    threads = []
    start: Any = Llm.__dict__["from_engine_args"].__func__

    def noting(cls, args, usage_context):
        threads.append(threading.current_thread().name)
        return start(cls, args, usage_context)

    monkeypatch.setattr(Llm, "from_engine_args", classmethod(noting))
    monkeypatch.setattr(Llm, "shutdown", lambda _: threads.append(threading.current_thread().name))
    front.fails = 1
    Llm.started[0].errored = True
    wait_for(lambda: len(front.engines) == 2, "the next engine")
    assert front.engines[-1] is Llm.started[-1]
    assert len(threads) == 4  # each attempt ends the engine before, and starts one
    assert "triton-engine" not in threads
