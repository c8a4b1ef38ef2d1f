"""In place of vLLM and the prompter: what an engine is made of; its loop and its threads are real."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from support.patience import LIMIT, wait_for
from triton_vllm.engine.pace import Pace

if TYPE_CHECKING:
    from collections.abc import Callable

PROMISED = LIMIT  # s until something that will happen has happened, however busy the machine is
PACE = Pace(health_period=0.01, question_period=0.01, backoff=(0.01,))
STEP = 30.0  # s that a step of the model may take


class Collector:
    """Holds early outputs as vLLM's RequestOutputCollector does."""

    put: Callable[[Any], None]  # set by what is attached to it

    def __init__(self, early=None):
        self.early = early

    def get_nowait(self):
        if isinstance(self.early, Exception):
            raise self.early
        return self.early


class DeadError(Exception):
    """In place of EngineDeadError."""


class RefusalError(Exception):
    """In place of VLLMClientError."""


class FailureError(Exception):
    """In place of GenerationError."""


class PassingError(FailureError):
    """In place of RetryableRequestError."""


class Llm:
    """In place of AsyncLLM."""

    started: ClassVar[list[Llm]] = []
    fail_starts = 0
    output_processor: Any  # where a test needs it

    def __init__(self):
        self.errored = False
        self.model_config = None
        self.collectors: dict[str, Collector] = {}
        self.aborted: list[str] = []
        self.closed = False
        self.add_error: Exception | None = None
        self.early = None
        self.hangs = self.waits = False
        self.unhealthy: Exception | None = None
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

    async def check_health(self):
        if self.unhealthy:
            raise self.unhealthy

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

    async def start(self, llm):
        self.started = llm

    async def make(self, llm, prompt, params):
        return {"prompt": "x"}, params


class Never(Prompter):
    """A prompter that does not come to an end."""

    async def make(self, llm, prompt, params):
        await asyncio.Event().wait()


class Log:
    """Keeps lines."""

    def __init__(self):
        self.lines = []

    def error(self, text):
        self.lines.append(text)

    info = warning = error


class LoopClock:
    """The clock of an engine's loop, which only a test moves on: deadlines and grace periods end when it says so."""

    def __init__(self, engine):
        self.now = engine._loop.time()
        engine._loop.time = lambda: self.now


def added(engine, j):
    j.submit(engine)
    llm = Llm.started[-1]
    wait_for(lambda: j.id in llm.collectors and "put" in vars(llm.collectors[j.id]), "the request in the engine")
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


class TickingClock(LoopClock):
    """Goes on by itself a little each time that it is read, so that the loop's short pauses end, and as a test says."""

    def __init__(self, engine):
        self.now = engine._loop.time()
        engine._loop.time = self.read

    def read(self):
        self.now += 1e-4
        return self.now


def blocked(engine):
    """Hold the engine's loop; return what lets it go on."""
    held, go_on = threading.Event(), threading.Event()
    engine._loop.call_soon_threadsafe(lambda: (held.set(), go_on.wait(PROMISED)))
    assert held.wait(PROMISED)
    return go_on.set
