"""The engine as a whole: it dies, hangs, is replaced, gets stuck and ends, and each request has its answer."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from support.engine_parts import (
    PACE,
    PROMISED,
    STEP,
    Llm,
    Log,
    LoopClock,
    Never,
    Prompter,
    TickingClock,
    added,
    blocked,
    output,
)
from support.fake_reply import FakeChannel
from support.fake_reply import fake_job as job
from support.patience import pause, wait_for
from triton_vllm.answer import NOT_SENT
from triton_vllm.base.errors import DEAD, UNLOADING, StoppedError, UnavailableError
from triton_vllm.base.limits import USUAL
from triton_vllm.engine.engine import UNLOADED, Engine
from triton_vllm.instances.counts import Counts
from triton_vllm.instances.sleep import SleepState
from triton_vllm.instances.source import Loss, Sole


def test_a_dead_engine_is_replaced(started):
    """Jobs in flight fail at once, new ones until the engine is back; starting again is retried."""
    engine, got = started()
    _ = added(engine, job())
    Llm.fail_starts = 1 << 30
    old = Llm.started[-1]
    old.errored = True
    assert str(got.get(timeout=PROMISED)[1]) == DEAD
    wait_for(lambda: any(line.startswith("restart 2 failed") for line in engine._log.lines))
    assert not engine.runner.is_up()
    Llm.fail_starts = 0
    wait_for(engine.runner.is_up)
    assert old.closed
    _, put = added(engine, j := job())
    put(last := output(finished=True))
    assert got.get(timeout=PROMISED) == (j.reply, last)


def test_a_dead_engine_stays_dead_where_restart_is_off(started):
    """Then the model is unhealthy until it is unloaded."""
    engine, _ = started(restart=False)
    Llm.started[-1].errored = True
    wait_for(lambda: engine._log.lines)
    pause(10 * PACE.health_period)
    assert not engine.runner.is_up()
    assert engine._log.lines == ["the engine has died"]
    assert len(Llm.started) == 1


def test_vllms_own_health_check_is_asked_before_each_job(started):
    """Only where the operator wants it. It fails: the job is told after the operator's choice was done, and so are all others."""
    engine, got = started(restart=False)
    llm = Llm.started[-1]
    llm.unhealthy = RuntimeError("injected")
    _, put = added(engine, in_flight := job())
    order = []
    engine.runner.check_health(lambda: order.append("unload"))
    llm.unhealthy = None
    _, put_too = added(engine, job())
    llm.unhealthy = RuntimeError("injected")
    engine.runner._put = lambda reply, item: (order.append(str(item)), got.put((reply, item)))
    engine.runner.submit(refused := job())
    assert got.get(timeout=PROMISED)[0] == refused.reply
    assert order == ["unload", DEAD]
    assert not engine.runner.is_up()
    assert any("vLLM's health check failed" in line and "RuntimeError: injected" in line for line in engine._log.lines)
    llm.unhealthy = None
    engine.runner.submit(job())
    assert str(got.get(timeout=PROMISED)[1]) == DEAD
    pause(10 * PACE.health_period)
    for finish in (put, put_too):  # those in flight end in their own way, and the model is unloaded after them
        engine._loop.call_soon_threadsafe(finish, last := output(finished=True))
        assert got.get(timeout=PROMISED)[1] is last
    assert in_flight.ended


def test_an_engine_that_fails_vllms_health_check_is_replaced(started):
    """Where engines are started again, as a dead one; the new one is healthy until its own check fails."""
    engine, got = started()
    added(engine, in_flight := job())
    engine.runner.check_health(lambda: None)
    Llm.started[-1].unhealthy = RuntimeError("injected")
    engine.runner.submit(refused := job())
    told = [got.get(timeout=PROMISED) for _ in range(2)]
    assert {reply for reply, _ in told} == {in_flight.reply, refused.reply}
    assert {str(error) for _, error in told} == {DEAD}
    wait_for(lambda: len(Llm.started) == 2 and engine.runner.is_up())
    assert "the engine has failed vLLM's health check, starting it again" in engine._log.lines
    _, put = added(engine, j := job())
    put(last := output(finished=True))
    assert got.get(timeout=PROMISED) == (j.reply, last)


@pytest.mark.parametrize(("silence", "limit"), [(0.0, STEP), (40.0, 40.0)])
def test_an_engine_that_hangs_is_replaced(started, silence, limit):
    """It answers nothing while requests are open: they are told, and another engine is started, as for a dead one.

    The limit is the model's parameter; without one it is vLLM's own for a step.
    """
    engine, got = started(silence=silence)
    clock = TickingClock(engine)
    hung, _ = added(engine, job())
    hung.hangs = True
    wait_for(lambda: hung.waits)
    clock.now += limit - 1
    with pytest.raises(queue.Empty):
        got.get(timeout=0.2)
    assert engine.runner.is_up()
    clock.now += 2
    assert str(got.get(timeout=PROMISED)[1]) == DEAD
    wait_for(lambda: len(Llm.started) == 2 and engine.runner.is_up())
    assert hung.closed
    assert f"the engine does not answer for {limit:.0f} s, starting it again" in engine._log.lines
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


def test_a_request_that_cannot_be_added_in_time_is_logged(started):
    """Its tokenizer hangs, say."""
    engine, _ = started(silence=40.0)
    engine.runner._prompter = Never()
    clock = TickingClock(engine)
    engine.runner.submit(j := job())
    wait_for(lambda: j.task is not None)
    clock.now += 41
    wait_for(lambda: engine._log.lines)
    assert "it is being added" in engine._log.lines[0]


def test_an_answer_that_cannot_be_queued_is_no_silence(started):
    """The outbox failed: the client is told by the engine, and the log why."""
    engine, got = started()
    channel = FakeChannel()
    _, put = added(engine, j := job(channel))
    failures = [MemoryError("injected")]

    def fails_once(j, item):
        if failures:
            raise failures.pop()
        got.put((j, item))

    engine.runner._put = fails_once
    engine._loop.call_soon_threadsafe(put, output(finished=True))
    wait_for(lambda: j.reply.closed)
    assert [str(error) for error, _ in channel.sent] == [NOT_SENT]
    assert "injected" in engine._log.lines[0]
    assert engine.runner.in_flight.jobs() == []


@pytest.mark.parametrize("error", [KeyError("injected"), SystemExit("injected")])
def test_an_exception_does_not_end_the_event_loop(started, error):
    """Every request goes through it; one that came out of a callback is logged, and the next one is served."""

    def fails():
        raise error

    engine, got = started()
    engine._loop.call_soon_threadsafe(fails)
    wait_for(lambda: engine._log.lines)
    _, put = added(engine, j := job())
    engine._loop.call_soon_threadsafe(put, last := output(finished=True))
    assert got.get(timeout=PROMISED) == (j.reply, last)
    assert [line.count("injected") > 0 for line in engine._log.lines] == [True]


def test_an_engine_that_answers_may_take_its_time(started):
    """A request without outputs is no reason: a whole answer takes minutes."""
    engine, got = started()
    llm, _ = added(engine, job())
    for _ in range(5):
        assert llm.asked.acquire(timeout=PROMISED)
    assert got.empty()
    assert engine.runner.is_up()


def test_an_idle_engine_is_not_asked(started):
    """Nobody waits for it, and a question wakes its process."""
    engine, _ = started()
    pause(10 * PACE.health_period)
    assert not Llm.started[-1].asked.acquire(blocking=False)
    assert engine.runner.is_up()


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


class Shared(Sole):
    """An engine that another process has started."""

    leads = False

    def __init__(self):
        self.lost, self.calls = None, []
        self.counts, self.sleep_state = Counts(), SleepState()

    async def start(self, *, in_thread=False):
        self.lost = None
        return Llm()

    def loss(self):
        return self.lost

    def share(self):
        self.calls.append("share")

    def retire(self, *, hung):
        self.calls.append(("retire", hung))

    def close(self):
        self.calls.append("close")


def test_the_end_of_a_shared_engine_is_told_and_the_next_is_awaited():
    """Who shares it is told what this process has found."""
    source, log, prompter = Shared(), Log(), cast("Any", Prompter())
    got: queue.Queue[Any] = queue.Queue()
    vllm: Any = SimpleNamespace(step_timeout_s=STEP)
    engine = Engine(vllm, source, prompter, log=log, limits=USUAL, pace=PACE)
    engine.start(lambda j, item: got.put((j, item)))
    for loss in (Loss("has died"), Loss("was unloaded", in_order=True)):
        added(engine, job())
        source.lost = loss
        assert str(got.get(timeout=PROMISED)[1]) == DEAD
        wait_for(engine.runner.is_up)
    engine.stop(0)
    assert source.calls == ["share", ("retire", False), "share", ("retire", False), "share", "close"]
    # It may be asleep already, and has sampled a token for the process that started it.
    assert not hasattr(prompter, "started")
    assert [line for line in log.lines if line.startswith("the engine")][0::2] == [
        "the engine has died, starting it again",
        "the engine was unloaded",
    ]


def test_a_server_that_ends_gets_its_answers_in_time(started):
    """After the grace period what is in flight is told, and what comes later at once: nothing holds the server up."""
    engine, got = started()
    clock = LoopClock(engine)
    llm, put = added(engine, done := job())
    added(engine, late := job())
    engine.leave(20)
    engine._loop.call_soon_threadsafe(put, last := output(finished=True))
    assert got.get(timeout=PROMISED) == (done.reply, last)
    clock.now += 21
    reply, error = got.get(timeout=PROMISED)
    assert (reply, type(error), str(error)) == (late.reply, StoppedError, UNLOADED)
    wait_for(lambda: llm.aborted == [late.id])
    engine.runner.submit(later := job())
    clock.now += 1
    assert got.get(timeout=PROMISED)[0] is later.reply


@pytest.mark.parametrize("alone", [True, False])
def test_a_server_that_ends_waits_for_its_clients_without_an_engine(started, monkeypatch, alone):
    """A client that does not read may hold Triton for ever, but not the devices' memory. Other instances still need theirs."""
    monkeypatch.setattr(Sole, "alone", alone)
    engine, got = started()
    clock = LoopClock(engine)
    llm, _ = added(engine, late := job())
    engine.leave(20)
    begun = threading.Event()
    engine._loop.call_soon_threadsafe(begun.set)
    assert begun.wait(PROMISED)
    clock.now += 21
    assert got.get(timeout=PROMISED)[0] is late.reply
    wait_for(lambda: llm.aborted == [late.id])
    assert not llm.closed
    clock.now += 1
    if alone:
        wait_for(lambda: llm.closed)
        assert not engine.runner.is_up()
        engine.runner.submit(last := job())
        reply, error = got.get(timeout=PROMISED)
        assert (reply, type(error), str(error)) == (last.reply, StoppedError, UNLOADING)
    pause(10 * PACE.health_period)
    assert llm.closed is alone
    assert len(Llm.started) == 1  # it is not started again
    engine.stop(0)
    assert llm.closed


def test_a_job_is_in_flight_as_soon_as_it_is_submitted(started):
    """The watch looks right after: a request that it does not see would not be watched until the next one came."""
    engine, _ = started()
    go_on = blocked(engine)
    j = job()
    engine.runner.submit(j)
    assert engine.runner.in_flight.jobs() == [j]
    go_on()


def test_a_job_that_has_ended_before_the_loop_took_it_is_not_begun(started):
    """The engine died, or the model was unloaded: it is told once, and vLLM never hears of it."""
    engine, got = started()
    go_on = blocked(engine)
    j, error = job(), UnavailableError("unloaded")
    engine._loop.call_soon_threadsafe(engine.runner._abort, j, error)
    engine.runner.submit(j)
    go_on()
    assert got.get(timeout=PROMISED) == (j.reply, error)
    engine.stop(0)
    assert got.empty()
    assert Llm.started[-1].collectors == {}


def test_stop_waits_for_requests_within_its_bound(started):
    """What can finish does; the rest is told, aborted and the engine shut down."""
    engine, got = started()
    clock = LoopClock(engine)
    _, put = added(engine, job())
    added(engine, late := job())
    drain, waits = engine._drain, threading.Event()

    async def noted(grace_s):
        engine._loop.call_soon(waits.set)  # after the first step of `drain`
        await drain(grace_s)

    engine._drain = noted
    stopping = threading.Thread(target=engine.stop, args=(0.5,))
    stopping.start()
    assert waits.wait(PROMISED)
    clock.now += 0.4
    engine._loop.call_soon_threadsafe(put, output(finished=True))
    assert got.get(timeout=PROMISED)[1].finished
    assert stopping.is_alive()
    assert got.empty()
    clock.now += 0.5
    stopping.join(PROMISED)
    assert not stopping.is_alive()
    assert got.get_nowait()[0] is late.reply
    assert Llm.started[-1].closed


def test_a_failed_start_is_raised_and_leaves_no_thread():
    """What vLLM says about the model reaches Triton."""
    Llm.started, Llm.fail_starts = [], 1
    vllm: Any = SimpleNamespace(
        AsyncEngineArgs=lambda **_: None,
        AsyncLLM=Llm,
        UsageContext=SimpleNamespace(API_SERVER=None),
        enable_envs_cache=None,
        disable_envs_cache=None,
        step_timeout_s=STEP,
    )
    engine = Engine(vllm, Sole(vllm, {}), cast("Any", Prompter()), log=Log(), limits=USUAL, pace=PACE)
    with pytest.raises(RuntimeError, match="no memory"):
        engine.start(lambda *_: None)
    assert not engine._thread._thread.is_alive()
