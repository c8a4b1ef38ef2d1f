"""How long a silent engine is waited for: a stopped one not for long, one that works until the limit."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from support.patience import wait_for
from triton_vllm.engine.patience import Patience, cpu_seconds

if TYPE_CHECKING:
    from collections.abc import Callable


async def never() -> bool:
    """Return no answer."""
    await asyncio.Event().wait()
    return False


async def refused() -> bool:
    """Fail as a dead engine does."""
    raise ConnectionError("dead")


class Time:
    """Passes in steps: a wait takes no time but on this clock, and its end may change what the engine does."""

    def __init__(self, at_end: Callable[[float], None] = lambda _: None) -> None:
        self.now = 100.0
        self.at_end = at_end

    async def wait(self, tasks: set[asyncio.Task[Any]], timeout: float) -> None:
        """Let the tasks run, and then let the time pass if they are not done."""
        for _ in range(3):
            await asyncio.sleep(0)
        if not all(task.done() for task in tasks):
            self.now += timeout
            self.at_end(self.now)


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> Callable[..., float]:
    """Return for how long a question has no answer."""

    def run(patience: Patience, time: Time, question: Any = never, moved: Callable[[], float] = lambda: 0.0) -> float:
        async def main() -> float:
            monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: time.now)
            monkeypatch.setattr(asyncio, "wait", time.wait)
            return await patience.lasts(question(), moved)

        return asyncio.run(main())

    return run


def test_an_idle_engine_hangs_after_a_minute(silence):
    """It uses no processor time, and no output comes."""
    assert silence(Patience(300.0, 60.0, lambda: 7.0), Time()) == 60.0


def test_an_engine_that_works_may_be_silent_until_the_limit(silence):
    """A compilation of two minutes is no fault."""
    time = Time()
    assert silence(Patience(300.0, 60.0, lambda: time.now), time) == 300.0


def test_an_engine_that_stops_working_hangs_a_minute_later(silence):
    """It compiled for two minutes, and then nothing came."""
    time = Time()
    assert silence(Patience(300.0, 60.0, lambda: min(time.now, 210.0)), time) == 180.0


def test_an_engine_whose_outputs_come_does_not_hang(silence):
    """An answer may be late: the loop that takes it has much to do."""
    time = Time()
    assert silence(Patience(300.0, 60.0, lambda: 7.0), time, moved=lambda: time.now) == 300.0


def test_an_operators_own_limit_is_the_only_one(silence):
    """Whatever the engine does."""
    assert silence(Patience(40.0, 0.0, lambda: 7.0), Time()) == 40.0


def test_an_answer_in_time_and_an_error(silence):
    """The first is no silence; the error is the question's own."""
    assert silence(Patience(300.0, 60.0, lambda: 7.0), Time(), question=lambda: asyncio.sleep(0)) == 0.0
    with pytest.raises(ConnectionError, match="dead"):
        silence(Patience(300.0, 60.0, lambda: 7.0), Time(), question=refused)


def test_the_work_of_children_and_of_their_children_counts():
    """Also of those that have ended, as compilers have: their parent has waited for them."""
    code = "sum(range(4_000_000))"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}]); print(flush=True); input()"
    before = cpu_seconds()
    child = subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout
        child.stdout.readline()
        wait_for(lambda: cpu_seconds() > before + 0.02, "the time of the child's child")
    finally:
        child.communicate(b"\n")
