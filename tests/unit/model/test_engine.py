"""The engine keeps its promises to each request: one outcome, in time, whatever happens to vLLM.

vLLM itself is replaced by a small stand-in here, with the methods that `compat` uses; the loop, threads and clocks are real.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest

from support.fake_reply import FakeChannel
from support.fake_reply import fake_job as job
from triton_vllm.delivery.reply import NOT_SENT
from triton_vllm.errors import DEAD, CancelledError, InternalError, InvalidRequestError, UnavailableError
from triton_vllm.inference.engine import UNLOADED, Engine, Pace

PROMISED = 60.0  # s until something that will happen has happened, however busy the machine is
PACE = Pace(health_period=0.01, question_period=0.01, backoff=(0.01,))
STEP = 30.0  # s that a step of the model may take


class Collector:
    """Holds early outputs as vLLM's RequestOutputCollector does."""

    def __init__(self, early=None):
        self.early = early

    def get_nowait(self):
        if isinstance(self.early, Exception):
            raise self.early
        return self.early


class DeadError(Exception):
    """In place of EngineDeadError."""


class Llm:
    """In place of AsyncLLM."""

    started: ClassVar[list[Llm]] = []
    fail_starts = 0

    def __init__(self):
        self.errored = False
        self.collectors: dict[str, Collector] = {}
        self.aborted: list[str] = []
        self.closed = False
        self.add_error: Exception | None = None
        self.early = None
        self.hangs = self.waits = False
        self.asked = threading.Semaphore(0)
        Llm.started.append(self)

    @classmethod
    def from_engine_args(cls, args, usage_context):
        if cls.fail_starts:
            cls.fail_starts -= 1
            raise RuntimeError("no memory")
        return cls()

    async def get_supported_tasks(self):
        return ("generate",)

    async def add_request(self, request_id, prompt, params, lora_request=None, priority=0):
        if self.add_error:
            raise self.add_error
        self.collectors[request_id] = Collector(self.early)
        return self.collectors[request_id]

    async def abort(self, request_id):
        self.aborted.append(request_id)

    async def is_sleeping(self):
        self.asked.release()
        if self.hangs:
            self.waits = True
            await asyncio.Event().wait()
        return False

    def shutdown(self):
        self.closed = True


class Prompter:
    """In place of the real one, which needs a tokenizer."""

    async def make(self, llm, request):
        return {"prompt": "x"}


class Never:
    """A prompter that does not come to an end."""

    async def make(self, llm, request):
        await asyncio.Event().wait()


class Log:
    """Keeps lines."""

    def __init__(self):
        self.lines = []

    def error(self, text):
        self.lines.append(text)

    info = warning = error


@pytest.fixture
def started():
    """Engines to stop at the end."""
    Llm.started, Llm.fail_starts = [], 0
    engines = []

    def start(*, restart=True, silence=0.0):
        vllm = SimpleNamespace(
            AsyncEngineArgs=lambda **_: None,
            AsyncLLM=Llm,
            UsageContext=SimpleNamespace(API_SERVER=None),
            EngineDeadError=DeadError,
            refusals=(),
            client_errors=(ValueError, TypeError),
            busy_errors=(),
            enable_envs_cache=None,
            disable_envs_cache=None,
            step_timeout_s=STEP,
        )
        got = queue.Queue()
        engine = Engine(vllm, {}, Prompter(), log=Log(), restart=restart, pace=replace(PACE, silence=silence))
        engine.start(lambda j, item: got.put((j, item)))
        engines.append(engine)
        return engine, got

    yield start
    for engine in engines:
        engine.stop(0)


def until(condition):
    end = time.monotonic() + PROMISED
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


class LoopClock:
    """The clock of an engine's loop, which only a test moves on: deadlines and grace periods end when it says so."""

    def __init__(self, engine):
        self.now = engine._loop.time()
        engine._loop.time = lambda: self.now


def added(engine, j):
    engine.submit(j)
    llm = Llm.started[-1]
    until(lambda: j.id in llm.collectors and "put" in vars(llm.collectors[j.id]))
    return llm, llm.collectors[j.id].put


def output(*, finished, reason=None, index=0):
    """Return a RequestOutput with one completion."""
    return SimpleNamespace(finished=finished, outputs=[SimpleNamespace(index=index, finish_reason=reason)])


def raised(error, module):
    """Return an exception that a `raise` in a module of that name made."""
    try:
        exec("raise error", {"__name__": module, "error": error})
    except type(error) as made:
        return made


def test_outputs_come_in_order_and_end_with_the_finished_one(started):
    """What vLLM puts is passed on as it is; after the finished one the job is gone and late ones are dropped."""
    engine, got = started()
    j = job()
    _, put = added(engine, j)
    first, last = output(finished=False), output(finished=True)
    put(first)
    put(last)
    put(output(finished=False))
    assert [got.get(timeout=PROMISED)[1] for _ in range(2)] == [first, last]
    assert got.empty()
    assert engine.jobs() == []


def test_an_output_that_came_before_attaching_is_not_lost(started):
    """vLLM may have put an output into the collector already when `add_request` returns."""
    engine, got = started()
    early = output(finished=True)
    Llm.started[-1].early = early
    engine.submit(job())
    assert got.get(timeout=PROMISED)[1] is early


@pytest.mark.parametrize(
    ("cause", "told"),
    [
        (raised(ValueError("prompt too long"), "vllm.v1.engine.processor"), InvalidRequestError("prompt too long")),
        (raised(ValueError("x" * 5000), "vllm.sampling_params"), InvalidRequestError("x" * 500)),
        (TypeError("add_request() got an unexpected keyword argument 'priority'"), InternalError()),
        (raised(ValueError("secret internals"), "numpy.core"), InternalError()),
        (DeadError(), UnavailableError(DEAD)),
        (RuntimeError("secret internals"), InternalError()),
    ],
)
def test_errors_are_translated(started, cause, told):
    """vLLM's refusal reaches the client; an error that is not the client's is logged and carries no internals there."""
    engine, got = started()
    Llm.started[-1].add_error = cause
    engine.submit(job())
    item = got.get(timeout=PROMISED)[1]
    assert type(item) is type(told)
    assert not isinstance(told, InvalidRequestError) or str(item) == str(told)
    assert "secret" not in str(item)
    assert len(engine._log.lines) == isinstance(told, InternalError)
    assert all("Traceback" in line and str(cause) in line for line in engine._log.lines)
    Llm.started[-1].add_error = None
    _, put = added(engine, j := job())  # and the next one is served
    put(last := output(finished=True))
    assert got.get(timeout=PROMISED) == (j, last)


def test_the_same_failure_again_is_a_line_in_the_log(started):
    """A vLLM that has moved on fails for every request: one traceback tells why, and each request has its line."""
    engine, got = started()
    Llm.started[-1].add_error = TypeError("add_request() got an unexpected keyword argument 'priority'")
    for _ in range(3):
        engine.submit(job())
        got.get(timeout=PROMISED)
    assert ["Traceback" in line for line in engine._log.lines].count(True) == 1
    assert len(engine._log.lines) == 3


def test_a_failed_output_handler_is_nobodys_fault(started):
    """vLLM gives its exception to everyone in flight: all may try again, and the log has it once."""
    engine, got = started()
    puts = [added(engine, job())[1] for _ in range(3)]
    error = raised(ValueError("a detokenizer's fault"), "vllm.v1.engine.output_processor")
    for put in puts:
        engine._loop.call_soon_threadsafe(put, error)
    told = [got.get(timeout=PROMISED)[1] for _ in puts]
    assert {(type(e), str(e)) for e in told} == {(UnavailableError, DEAD)}
    assert [line.count("Traceback") for line in engine._log.lines] == [1]


class Pooled:
    """In place of a tensor of pooled numbers."""

    def __init__(self, count):
        self.numel = lambda: count


def pooled(count, error=None):
    return SimpleNamespace(finished=True, outputs=SimpleNamespace(data=Pooled(count)), error=error)


@pytest.mark.parametrize(
    ("last", "kind"),
    [
        (output(finished=True, reason="error"), InternalError),
        (pooled(0), InternalError),
        (pooled(0, SimpleNamespace(retryable=True)), UnavailableError),
        (pooled(0, SimpleNamespace(retryable=False)), InternalError),
    ],
)
def test_a_request_that_failed_in_the_engine_is_no_success(started, last, kind):
    """vLLM ends it with an output that says so and has no text or numbers: the client is told an error."""
    engine, got = started()
    j = job()
    _, put = added(engine, j)
    put(last)
    told = got.get(timeout=PROMISED)[1]
    assert type(told) is kind
    assert "the engine could not finish this request" in str(told)
    assert engine.jobs() == []


@pytest.mark.parametrize("last", [output(finished=True, reason="stop"), pooled(3)])
def test_a_request_that_succeeded_is_none_of_these(started, last):
    """Its last output is passed on as it is."""
    engine, got = started()
    _, put = added(engine, job())
    put(last)
    assert got.get(timeout=PROMISED)[1] is last


def test_one_failed_completion_of_several_ends_the_request(started):
    """Those that go on are aborted: a part of an answer is none."""
    engine, got = started()
    j = job()
    j.several = True
    llm, put = added(engine, j)
    put(output(finished=False, index=0))
    engine._loop.call_soon_threadsafe(put, output(finished=False, reason="error", index=1))
    assert not got.get(timeout=PROMISED)[1].finished
    assert isinstance(got.get(timeout=PROMISED)[1], InternalError)
    until(lambda: llm.aborted == [j.id])
    put(output(finished=True, reason="stop", index=0))
    assert got.empty()


def test_an_exception_over_an_output_stays_with_its_request(started):
    """It is raised in vLLM's output handler, which would end, and everyone's requests with it."""
    engine, got = started()
    llm, put = added(engine, j := job())
    engine._loop.call_soon_threadsafe(put, SimpleNamespace())  # no output at all
    assert isinstance(got.get(timeout=PROMISED)[1], InternalError)
    until(lambda: llm.aborted == [j.id])
    assert "an output was not taken" in engine._log.lines[0]


def test_a_cancelled_job_is_aborted_and_told(started):
    """The engine stops working on it, the client gets CANCELLED, and nothing follows."""
    engine, got = started()
    j = job()
    llm, put = added(engine, j)
    engine.cancel(j)
    assert isinstance(got.get(timeout=PROMISED)[1], CancelledError)
    until(lambda: llm.aborted == [j.id])
    put(output(finished=True))
    assert got.empty()


def test_a_deadline_aborts(started):
    """A request that is late ends with UNAVAILABLE within its timeout (in microseconds)."""
    engine, got = started()
    clock = LoopClock(engine)
    j = job(timeout=50_000)
    llm, _ = added(engine, j)
    clock.now += 0.049
    with pytest.raises(queue.Empty):
        got.get(timeout=0.2)
    clock.now += 0.002
    item = got.get(timeout=PROMISED)[1]
    assert isinstance(item, UnavailableError)
    assert "timeout of 50000 us" in str(item)
    until(lambda: llm.aborted == [j.id])


def test_a_dead_engine_is_replaced(started):
    """Jobs in flight fail at once, new ones until the engine is back; starting again is retried."""
    engine, got = started()
    _ = added(engine, job())
    Llm.fail_starts = 1 << 30
    old = Llm.started[-1]
    old.errored = True
    assert str(got.get(timeout=PROMISED)[1]) == DEAD
    until(lambda: any(line.startswith("restart 2 failed") for line in engine._log.lines))
    assert not engine.is_healthy()
    Llm.fail_starts = 0
    until(engine.is_healthy)
    assert old.closed
    _, put = added(engine, j := job())
    put(last := output(finished=True))
    assert got.get(timeout=PROMISED) == (j, last)


def test_a_dead_engine_stays_dead_where_restart_is_off(started):
    """Then the model is unhealthy until it is unloaded."""
    engine, _ = started(restart=False)
    Llm.started[-1].errored = True
    until(lambda: engine._log.lines)
    time.sleep(10 * PACE.health_period)
    assert not engine.is_healthy()
    assert engine._log.lines == ["the engine has died"]
    assert len(Llm.started) == 1


class TickingClock(LoopClock):
    """Goes on by itself a little each time that it is read, so that the loop's short pauses end, and as a test says."""

    def __init__(self, engine):
        self.now = engine._loop.time()
        engine._loop.time = self.read

    def read(self):
        self.now += 1e-4
        return self.now


@pytest.mark.parametrize(("silence", "limit"), [(0.0, STEP), (40.0, 40.0)])
def test_an_engine_that_hangs_is_replaced(started, silence, limit):
    """It answers nothing while requests are open: they are told, and another engine is started, as for a dead one.

    The limit is the model's parameter; without one it is vLLM's own for a step.
    """
    engine, got = started(silence=silence)
    clock = TickingClock(engine)
    hung, _ = added(engine, job())
    hung.hangs = True
    until(lambda: hung.waits)
    clock.now += limit - 1
    with pytest.raises(queue.Empty):
        got.get(timeout=0.2)
    assert engine.is_healthy()
    clock.now += 2
    assert str(got.get(timeout=PROMISED)[1]) == DEAD
    until(lambda: len(Llm.started) == 2 and engine.is_healthy())
    assert hung.closed
    assert f"the engine does not answer for {limit:.0f} s, starting it again" in engine._log.lines
    _, put = added(engine, j := job())
    put(last := output(finished=True))
    assert got.get(timeout=PROMISED) == (j, last)


def test_a_request_without_output_is_logged_with_its_state(started):
    """Once, and again only after it has moved; those with outputs are not."""
    engine, got = started(silence=40.0)
    clock = TickingClock(engine)
    _, moving = added(engine, job())
    _, put = added(engine, stuck := job())
    stuck.pending.append("an output that was not sent")
    for _ in range(3):
        clock.now += 30
        engine._loop.call_soon_threadsafe(moving, output(finished=False))
        got.get(timeout=PROMISED)
        time.sleep(5 * PACE.health_period)
    (line,) = engine._log.lines
    assert line == f"1 requests have had no output for 40 s: {stuck.id}: vLLM has it, 1 outputs wait to be sent"
    engine._loop.call_soon_threadsafe(put, output(finished=False))
    got.get(timeout=PROMISED)
    clock.now += 30
    engine._loop.call_soon_threadsafe(moving, output(finished=False))
    got.get(timeout=PROMISED)
    clock.now += 30
    until(lambda: len(engine._log.lines) == 2)


def test_a_request_that_cannot_be_added_in_time_is_logged(started):
    """Its tokenizer hangs, say."""
    engine, _ = started(silence=40.0)
    engine._prompter = Never()
    clock = TickingClock(engine)
    engine.submit(j := job())
    until(lambda: j.task is not None)
    clock.now += 41
    until(lambda: engine._log.lines)
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

    engine._put = fails_once
    engine._loop.call_soon_threadsafe(put, output(finished=True))
    until(lambda: j.reply.closed)
    assert [str(error) for error, _ in channel.sent] == [NOT_SENT]
    assert "injected" in engine._log.lines[0]
    assert engine.jobs() == []


@pytest.mark.parametrize("error", [KeyError("injected"), SystemExit("injected")])
def test_an_exception_does_not_end_the_event_loop(started, error):
    """Every request goes through it; one that came out of a callback is logged, and the next one is served."""

    def fails():
        raise error

    engine, got = started()
    engine._loop.call_soon_threadsafe(fails)
    until(lambda: engine._log.lines)
    _, put = added(engine, j := job())
    engine._loop.call_soon_threadsafe(put, last := output(finished=True))
    assert got.get(timeout=PROMISED) == (j, last)
    assert [line.count("injected") > 0 for line in engine._log.lines] == [True]


def test_an_engine_that_answers_may_take_its_time(started):
    """A request without outputs is no reason: a whole answer takes minutes."""
    engine, got = started()
    llm, _ = added(engine, job())
    for _ in range(5):
        assert llm.asked.acquire(timeout=PROMISED)
    assert got.empty()
    assert engine.is_healthy()


def test_an_idle_engine_is_not_asked(started):
    """Nobody waits for it, and a question wakes its process."""
    engine, _ = started()
    time.sleep(10 * PACE.health_period)
    assert not Llm.started[-1].asked.acquire(blocking=False)
    assert engine.is_healthy()


def test_a_check_that_fails_is_not_the_last(started):
    """An exception in it would leave a dead engine unnoticed for ever."""
    engine, got = started()
    bury, failures = engine._bury, iter([KeyError("injected")])

    def fails_once():
        for failure in failures:
            raise failure
        bury()

    engine._bury = fails_once
    added(engine, job())
    Llm.started[-1].errored = True
    assert str(got.get(timeout=PROMISED)[1]) == DEAD
    assert "injected" in engine._log.lines[0]


def test_a_server_that_ends_gets_its_answers_in_time(started):
    """After the grace period what is in flight is told, and what comes later at once: nothing holds the server up."""
    engine, got = started()
    clock = LoopClock(engine)
    llm, put = added(engine, done := job())
    added(engine, late := job())
    engine.leave(20)
    engine._loop.call_soon_threadsafe(put, last := output(finished=True))
    assert got.get(timeout=PROMISED) == (done, last)
    clock.now += 21
    j, error = got.get(timeout=PROMISED)
    assert (j, type(error), str(error)) == (late, UnavailableError, UNLOADED)
    until(lambda: llm.aborted == [late.id])
    engine.submit(later := job())
    clock.now += 1
    assert got.get(timeout=PROMISED)[0] is later


def blocked(engine):
    """Hold the engine's loop; return what lets it go on."""
    held, go_on = threading.Event(), threading.Event()
    engine._loop.call_soon_threadsafe(lambda: (held.set(), go_on.wait(PROMISED)))
    assert held.wait(PROMISED)
    return go_on.set


def test_a_job_is_in_flight_as_soon_as_it_is_submitted(started):
    """The watch looks right after: a request that it does not see would not be watched until the next one came."""
    engine, _ = started()
    go_on = blocked(engine)
    j = job()
    engine.submit(j)
    assert engine.jobs() == [j]
    go_on()


def test_a_job_that_has_ended_before_the_loop_took_it_is_not_begun(started):
    """The engine died, or the model was unloaded: it is told once, and vLLM never hears of it."""
    engine, got = started()
    go_on = blocked(engine)
    j, error = job(), UnavailableError("unloaded")
    engine._loop.call_soon_threadsafe(engine._abort, j, error)
    engine.submit(j)
    go_on()
    assert got.get(timeout=PROMISED) == (j, error)
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
    assert got.get_nowait()[0] is late
    assert Llm.started[-1].closed


def test_a_failed_start_is_raised_and_leaves_no_thread():
    """What vLLM says about the model reaches Triton."""
    Llm.started, Llm.fail_starts = [], 1
    vllm = SimpleNamespace(
        AsyncEngineArgs=lambda **_: None,
        AsyncLLM=Llm,
        UsageContext=SimpleNamespace(API_SERVER=None),
        enable_envs_cache=None,
        disable_envs_cache=None,
        step_timeout_s=STEP,
    )
    engine = Engine(vllm, {}, Prompter(), log=Log(), restart=True)
    with pytest.raises(RuntimeError, match="no memory"):
        engine.start(lambda *_: None)
    assert not engine._thread.is_alive()
