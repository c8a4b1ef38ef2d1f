"""The engine as a whole: it dies, hangs, is replaced, gets stuck and ends, and each request has its answer."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, cast

import pytest

from support.engine_parts import (
    PACE,
    PROMISED,
    Llm,
    TickingClock,
    added,
    blocked,
    output,
)
from support.fake_reply import fake_job as job
from support.patience import pause, wait_for
from triton_vllm.base.errors import DEAD, NOT_TAKEN, UnavailableError
from triton_vllm.engine import engine as engine_module
from triton_vllm.instances.source import Loss
from triton_vllm.operator.run import ASLEEP


def test_a_dead_engine_stays_dead_where_restart_is_off(started):
    """Then the model is unhealthy until it is unloaded."""
    engine, _ = started(restart=False)
    Llm.started[-1].errored = True
    wait_for(lambda: engine._log.lines)
    pause(10 * PACE.health_period)
    assert not engine.jobs.is_up()
    assert engine._log.lines == ["the engine has died"]
    assert len(Llm.started) == 1


def test_an_engine_that_fails_vllms_health_check_is_replaced(started):
    """Where engines are started again, as a dead one; the new one is healthy until its own check fails."""
    engine, got = started()
    added(engine, in_flight := job())
    engine.runner.check_health(lambda: None)
    Llm.started[-1].unhealthy = RuntimeError("injected")
    (refused := job()).submit(engine)
    told = [got.get(timeout=PROMISED) for _ in range(2)]
    assert {reply for reply, _ in told} == {in_flight.reply, refused.reply}
    assert {str(error) for _, error in told} == {DEAD}
    wait_for(lambda: len(Llm.started) == 2 and engine.jobs.is_up())
    assert "the engine has failed vLLM's health check, starting it again" in engine._log.lines
    _, put = added(engine, j := job())
    put(last := output(finished=True))
    assert got.get(timeout=PROMISED) == (j.reply, last)


def test_a_request_without_output_is_logged_with_its_state(started):
    """Once, and again only after it has moved; those with outputs are not."""
    engine, got = started(silence=40.0)
    clock = TickingClock(engine)
    _, moving = added(engine, job())
    _, put = added(engine, stuck := job())
    stuck.reply.pending.append(cast("Any", "an output that was not sent"))
    looks, note_stuck = threading.Semaphore(0), engine._note_stuck
    engine._note_stuck = lambda: (note_stuck(), looks.release())
    for _ in range(3):
        clock.now += 30
        engine._loop.call_soon_threadsafe(moving, output(finished=False))
        got.get(timeout=PROMISED)
        while looks.acquire(blocking=False):
            pass
        for _ in range(2):  # the first may have begun before the output came
            assert looks.acquire(timeout=PROMISED)
    (line,) = engine._log.lines
    assert line == f"1 requests have had no output for 40 s: {stuck.id}: vLLM has it, 1 outputs wait to be sent"
    engine._loop.call_soon_threadsafe(put, output(finished=False))
    got.get(timeout=PROMISED)
    clock.now += 30
    engine._loop.call_soon_threadsafe(moving, output(finished=False))
    got.get(timeout=PROMISED)
    clock.now += 30
    wait_for(lambda: len(engine._log.lines) == 2)


def test_a_check_that_fails_is_not_the_last(started):
    """An exception in it would leave a dead engine unnoticed for ever."""
    engine, got = started()
    bury, failures = engine._bury, iter([KeyError("injected")])

    def fails_once(loss):
        for failure in failures:
            raise failure
        bury(loss)

    engine._bury = fails_once
    added(engine, job())
    Llm.started[-1].errored = True
    assert str(got.get(timeout=PROMISED)[1]) == DEAD
    assert "injected" in engine._log.lines[0]


def test_a_job_is_in_flight_as_soon_as_it_is_submitted(started):
    """The watch looks right after: a request that it does not see would not be watched until the next one came."""
    engine, _ = started()
    go_on = blocked(engine)
    j = job()
    j.submit(engine)
    assert engine.jobs.ledger.jobs() == [j.job]
    go_on()


def test_a_request_that_was_let_in_just_before_a_sleep_is_not_held(started):
    """vLLM would keep it until somebody wakes the engine up; it never hears of it."""
    engine, got = started()
    engine._source.sleep_state.closed = True
    (late := job()).submit(engine)
    reply, error = got.get(timeout=PROMISED)
    assert (reply, type(error), str(error)) == (late.reply, UnavailableError, ASLEEP)
    assert Llm.started[-1].collectors == {}


@pytest.mark.parametrize("by_another", [False, True])
def test_an_engine_that_is_given_up_ends_for_good_and_then_its_process(started, monkeypatch, by_another):
    """Here, or by another instance of the model, which shares it: all requests get the reason, and nothing is started again."""
    monkeypatch.setattr(engine_module, "LAST_WORDS_S", 0.01)
    engine, got = started()
    ended: list[int] = []
    told: list[str] = []
    engine._end_process = ended.append
    engine._source.forsake = told.append
    added(engine, j := job())
    if by_another:
        engine._source.loss = lambda: Loss("the reason", for_good=True)
    else:
        engine._loop.call_soon_threadsafe(engine.give_up, "the reason")
    reply, error = got.get(timeout=PROMISED)
    assert (reply, str(error), error.code) == (j.reply, NOT_TAKEN, "UNAVAILABLE")
    wait_for(lambda: ended, "the end of the process")
    assert (ended, told, engine._log.lines[0]) == ([1], ["the reason"], "the reason")
    assert [llm.closed for llm in Llm.started] == [True]
    assert not engine.jobs.is_up()


@pytest.mark.parametrize("moment", ["an engine starts", "the front gets it"])
def test_an_engine_that_is_given_up_while_it_starts_again_does_not_open(started, monkeypatch, moment):
    """What has been started meanwhile ends, too, and the other instances never hear of it."""
    engine, _ = started()
    engine._end_process = lambda _: None
    held, go_on = threading.Event(), threading.Event()
    shared: list[Llm] = []

    class Front:
        """Another API, with which an engine starts in a thread beside the loop."""

        async def use(self, llm, tasks):
            if moment == "the front gets it" and llm is not first:
                held.set()
                await asyncio.to_thread(go_on.wait, PROMISED)

        def leave(self):
            """Nothing to leave."""

        async def close(self):
            """Nothing to close."""

    def start(*_, **__):
        if moment == "an engine starts":
            held.set()
            assert go_on.wait(PROMISED)
        return Llm()

    first = Llm.started[0]
    engine.attach(Front())
    monkeypatch.setattr(Llm, "from_engine_args", start)
    monkeypatch.setattr(engine._source, "share", lambda: shared.append(Llm.started[-1]))
    revive, revived = engine._revive, threading.Event()

    async def revive_and_tell():
        await revive()
        revived.set()

    monkeypatch.setattr(engine, "_revive", revive_and_tell)
    first.errored = True
    assert held.wait(PROMISED)
    engine._loop.call_soon_threadsafe(engine.give_up, "the reason")
    wait_for(lambda: first.closed and engine.jobs.why_down == NOT_TAKEN, "the end of the first engine")
    go_on.set()
    assert revived.wait(PROMISED)
    assert [llm.closed for llm in Llm.started] == [True, True]
    assert not engine.jobs.is_up()
    assert shared == []
    assert not any("is back" in line for line in engine._log.lines)


def test_what_a_dead_engine_leaves_is_ended_before_the_next_one_starts(started, monkeypatch):
    """And the memory of each engine is noted."""
    engine, _ = started()
    events = []
    monkeypatch.setattr(engine._processes, "end", lambda: events.append(("ended", len(Llm.started))))
    monkeypatch.setattr(engine, "_when_started", lambda: events.append(("started", len(Llm.started))))
    Llm.started[-1].errored = True
    wait_for(lambda: len(Llm.started) == 2 and engine.jobs.is_up())
    assert events == [("ended", 1), ("started", 2)]


def test_an_engine_that_is_given_up_while_processes_end_does_not_start_again(started, monkeypatch):
    """Its start could take minutes, and the unload would wait for it."""
    engine, _ = started()
    engine._end_process = lambda _: None
    held, go_on, revived = threading.Event(), threading.Event(), threading.Event()
    revive = engine._revive

    async def revive_and_tell():
        await revive()
        revived.set()

    def end():
        held.set()
        assert go_on.wait(PROMISED)

    monkeypatch.setattr(engine, "_revive", revive_and_tell)
    monkeypatch.setattr(engine._processes, "end", end)
    Llm.started[-1].errored = True
    assert held.wait(PROMISED)
    engine._loop.call_soon_threadsafe(engine.give_up, "the reason")
    wait_for(lambda: engine.jobs.why_down == NOT_TAKEN, "the end")
    go_on.set()
    assert revived.wait(PROMISED)
    assert len(Llm.started) == 1


@pytest.mark.parametrize("fault", ["shutdown raises", "shutdown hangs", "the log is full"])
def test_an_engine_that_is_given_up_ends_its_process_whatever_fails(started, monkeypatch, fault):
    """Without that, the device's memory and the clients' requests would be kept for ever. The clients get their errors."""
    monkeypatch.setattr(engine_module, "LAST_WORDS_S", 0.01)
    engine, got = started()
    ended: list[int] = []
    go_on = threading.Event()
    engine._end_process = ended.append
    added(engine, j := job())

    def fail(*_: object) -> None:
        assert fault != "shutdown hangs" or go_on.wait(PROMISED)
        raise RuntimeError("injected")

    if fault == "the log is full":
        monkeypatch.setattr(engine._log, "error", fail)
    else:
        monkeypatch.setattr(Llm.started[-1], "shutdown", fail)
    engine._loop.call_soon_threadsafe(engine.give_up, "the reason")
    reply, error = got.get(timeout=PROMISED)
    assert (reply, str(error)) == (j.reply, NOT_TAKEN)
    try:
        wait_for(lambda: ended, "the end of the process", limit=10)
    finally:
        go_on.set()
