"""Another API over the engine: it gets each engine, and takes no more requests before the engine ends."""

from __future__ import annotations

import pytest

from support.engine_parts import Llm


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
