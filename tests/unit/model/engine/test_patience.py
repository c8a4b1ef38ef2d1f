"""How long a silent engine is waited for: a stopped one not for long, one that works until the limit."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import signal
import time as clocks
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from support.patience import wait_for
from triton_vllm import vllm_api
from triton_vllm.engine.patience import Patience, worked_seconds

if TYPE_CHECKING:
    from collections.abc import Callable


async def never() -> bool:
    """Return no answer."""
    await asyncio.Event().wait()
    return False


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
            return await patience.wait_for_answer(question(), moved)

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
    assert silence(Patience(300.0, 60.0, lambda: min(time.now, 220.0)), time) == 180.0


@pytest.mark.parametrize("worked", [math.inf, math.nan])
def test_an_engine_that_may_work_is_waited_for(silence, worked):
    """A GPU computes, a process waits for a disk, or the kernel does not say."""
    assert silence(Patience(300.0, 60.0, lambda: worked), Time()) == 300.0


def test_time_in_which_this_process_was_stopped_as_well_does_not_count(silence):
    """``docker pause`` stops the engine and the process that waits for it."""
    time = Time()

    def paused() -> float:
        if time.now == 150.0:
            time.now = 400.0
        return 7.0

    assert silence(Patience(900.0, 60.0, paused), time) == 360.0


def test_an_engine_whose_outputs_come_does_not_hang(silence):
    """An answer may be late: the loop that takes it has much to do."""
    time = Time()
    assert silence(Patience(300.0, 60.0, lambda: 7.0), time, moved=lambda: time.now) == 300.0


def test_an_operators_own_limit_is_the_only_one(silence):
    """Whatever the engine does."""
    assert silence(Patience(40.0, 0.0, lambda: 7.0), Time()) == 40.0


def work(seconds: float, ready: Any, end: Any) -> None:
    """Use the processor in a child that ends and in one that stays, then sleep."""
    for stays in (False, True):
        child = os.fork()
        if child == 0:
            until = clocks.process_time() + seconds
            while clocks.process_time() < until:
                pass
            if stays:
                ready.set()
                end.wait()
            os._exit(0)
        if not stays:
            os.waitpid(child, 0)
    end.wait()


@pytest.fixture
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_api, "devices_compute", lambda: False)


@pytest.mark.usefixtures("_on_cpu")
def test_the_work_of_the_engines_processes_and_their_children_counts():
    """Also of those that have ended, as compilers have. A stopped process does no work, whatever the others do."""
    context = multiprocessing.get_context("spawn")
    ready, end = context.Event(), context.Event()
    engine = context.Process(target=work, args=(0.3, ready, end), daemon=True)
    engine.start()
    try:
        assert ready.wait(60)
        wait_for(lambda: 0.6 <= worked_seconds() < math.inf, "both children's time")
        assert engine.pid
        os.kill(engine.pid, signal.SIGSTOP)
        wait_for(lambda: worked_seconds() == 0.0, "the stop")
        os.kill(engine.pid, signal.SIGCONT)
    finally:
        end.set()
        engine.join(60)


class Engine:
    """A process of the engine that this process has started."""

    pid = 1


def processes(monkeypatch: pytest.MonkeyPatch, *states: str) -> None:
    """Let an engine's processes be in these states; "gone" has just ended."""

    class Process:
        def __init__(self, state: str) -> None:
            self.state = state

        def status(self) -> str:
            if self.state == "gone":
                raise psutil.NoSuchProcess(1)
            return self.state

        def children(self, *, recursive: bool) -> list[Any]:
            assert recursive
            return [Process(state) for state in states[1:]]

        def cpu_times(self) -> SimpleNamespace:
            return SimpleNamespace(user=1.0, system=2.0, children_user=3.0, children_system=4.0)

    monkeypatch.setattr(multiprocessing, "active_children", lambda: [Engine] if states else [])
    monkeypatch.setattr("psutil.Process", lambda _: Process(states[0]))


@pytest.mark.parametrize("computes", [False, True])
@pytest.mark.parametrize(
    ("states", "seconds"),
    [
        (("sleeping", "sleeping"), 20.0),
        (("sleeping", "running"), math.inf),
        (("sleeping", "disk-sleep"), math.inf),
        (("stopped", "running"), 0.0),
        (("sleeping", "stopped", "disk-sleep"), 0.0),
        (("sleeping", "gone"), math.inf),
        ((), math.inf),
    ],
)
def test_what_waits_for_a_processor_or_a_disk_works(monkeypatch: pytest.MonkeyPatch, states, seconds, computes):
    """So may what this process has not started, and what has a GPU that computes; but nothing of it if one is stopped."""
    monkeypatch.setattr(vllm_api, "devices_compute", lambda: computes)
    processes(monkeypatch, *states)
    assert worked_seconds() == (math.inf if computes and seconds else seconds)
