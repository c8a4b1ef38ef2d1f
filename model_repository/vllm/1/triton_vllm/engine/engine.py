"""Run vLLM's AsyncLLM in an event loop on a thread of its own, and start it again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from triton_vllm import vllm_api
from triton_vllm.base import supervised
from triton_vllm.base.errors import DEAD, AdapterError, CancelledError, InternalError, UnavailableError
from triton_vllm.engine.outcome import Translator
from triton_vllm.engine.overdue import BEGUN, find_overdue
from triton_vllm.instances.source import PARTED
from triton_vllm.operator.request import OperatorRequest
from triton_vllm.operator.run import ASLEEP, Operator
from triton_vllm.pooling.gathering import Gathering
from triton_vllm.vllm_api.minimum import bound_minimum
from triton_vllm.vllm_api.refusals import FAILED, failure

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from concurrent.futures import Future

    from triton_vllm.base.protocols import Collector, EngineClient, Item, Log, Output
    from triton_vllm.engine.prompts import Prompter
    from triton_vllm.instances.source import Source
    from triton_vllm.job import Job
    from triton_vllm.lora.store import AdapterStore

    Put = Callable[[Job, Item], None]


@dataclass(frozen=True)
class Pace:
    """What the engine does when, in seconds.

    Attributes:
        health_period: between two checks.
        question_period: between two questions to EngineCore.
        silence: EngineCore hangs if it does not answer for so long, and a request is stuck if it has no output for so long;
            0 is as long as vLLM itself waits for a worker's step.
        backoff: before each attempt to start a dead engine again.
        deadline: from the coming of a request that gives no timeout to its end; 0 is none.
        queue: a request is refused that vLLM has not begun to work on for so long; 0 is no limit.
    """

    health_period: float = 0.5
    question_period: float = 10.0
    silence: float = 0.0
    backoff: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)
    deadline: float = 0.0
    queue: float = 0.0


USUAL_PACE = Pace()
_SHOWN = 20
"""Stuck requests in a line of the log; with a hung engine all are."""
UNLOADED = "the model was unloaded before the request had finished"


class Engine:
    """vLLM and the requests it works on.

    All public methods are called from other threads than the event loop's.

    Args:
        vllm: the loaded vLLM.
        source: where the engine comes from.
        prompter: makes prompts from requests.
        log: told what happens.
        restart: whether a dead engine is started again.
        pace: how often that is checked and tried.
    """

    def __init__(
        self,
        vllm: vllm_api.Vllm,
        source: Source,
        prompter: Prompter,
        *,
        log: Log,
        restart: bool,
        pace: Pace = USUAL_PACE,
    ) -> None:
        self._source = source
        self._prompter = prompter
        self._log = log
        self._translator = Translator(vllm, log)
        self._restart = restart
        self._pace = pace
        self._silence = pace.silence or vllm.step_timeout_s
        self._put: Put  # from `start` on
        self._store: AdapterStore | None = None
        self._jobs: dict[str, Job] = {}
        self._entered = self._left = 0  # parts of jobs; each number is written by one thread only
        self._unwritten: list[Job] = []  # ended ones whose bulky answers wait to be written; replaced, never changed
        self._llm: EngineClient  # from `_load` on
        self._operator = Operator(self._is_busy, log)
        self._loop = _new_loop()
        self._loop.set_exception_handler(self._note_failed)
        self._thread = supervised.thread("triton-engine", self._run, log)
        self._ending = threading.Event()
        self._asked_at = 0.0
        self._hung = False
        self.tasks: tuple[str, ...] = ()
        self.healthy = False

    def start(self, put: Put, store: AdapterStore | None = None) -> None:
        """Start the loop and load the model; return when requests can be taken.

        Args:
            put: takes each output of a job, an exception as its last one; called in the event loop's thread.
            store: the LoRA adapters, if the model has any.

        Raises:
            Exception: whatever vLLM raised.
        """
        self._put = put
        self._store = self._operator.store = store
        self._thread.start()
        try:
            self._call(self._load()).result()
        except BaseException:
            self._end_loop()
            raise
        self._loop.call_soon_threadsafe(self._check)

    def jobs(self) -> list[Job]:
        """Return the jobs in flight."""
        return list(self._jobs.values())  # one C call, so no other thread can change the dict meanwhile

    def in_flight(self) -> int:
        """Return how many requests vLLM has or will have or bulky answers wait for; each part of a pooling request is one."""
        return self._entered - self._left + sum(len(job.ids) for job in self._unwritten if not job.reply.closed)

    def _is_busy(self) -> bool:
        return any(not isinstance(job.request, OperatorRequest) for job in self.jobs())

    def is_asleep(self) -> bool:
        """Return whether only operator requests are taken."""
        return self._operator.asleep

    def scoring_task(self) -> str:
        """Return the pooling task by which the model scores pairs; nothing if it cannot."""
        return vllm_api.scoring_task(self._llm, self.tasks)

    def facts(self) -> vllm_api.Facts:
        """Return what the model can take."""
        return vllm_api.facts(self._llm)

    def chat_defaults(self) -> vllm_api.ChatDefaults:
        """Return what conversations have where a request gives nothing."""
        return vllm_api.chat_defaults(self._llm)

    def parsers(self, names: vllm_api.ParserNames) -> vllm_api.Parsers:
        """Return the parsers of these names for the engine's model."""
        return vllm_api.Parsers(self._llm, names)

    def submit(self, job: Job) -> None:
        """Take a job; its outcome comes through `put`."""
        job.moved = job.waiting_since = self._loop.time()
        # Here and not in the loop: the watch, woken next, would find nothing in flight and go to sleep again.
        self._jobs[job.id] = job
        self._entered += len(job.ids)
        self._loop.call_soon_threadsafe(self._begin, job)

    def cancel(self, job: Job) -> None:
        """Stop working on a job whose client has cancelled it."""
        self._loop.call_soon_threadsafe(self._abort, job, CancelledError("Request was cancelled"))

    def drop(self, job: Job) -> None:
        """Stop working on a job to which nothing can be sent any more."""
        self._loop.call_soon_threadsafe(self._abort, job, None)

    def is_healthy(self) -> bool:
        """Return whether the engine is up; costs no round trip."""
        return self.healthy and not vllm_api.is_dead(self._llm)

    def leave(self, grace_s: float) -> None:
        """Let requests in flight go on for `grace_s` seconds, then cancel them: the server ends, and waits for them no longer."""
        self._loop.call_soon_threadsafe(self._loop.call_later, grace_s, self._give_up)

    def stop(self, grace_s: float) -> None:
        """Finish what is in flight within `grace_s` seconds, cancel the rest and shut vLLM down; a second call does nothing."""
        if self._loop.is_closed():
            return
        self._ending.set()
        with contextlib.suppress(Exception):
            self._call(self._drain(grace_s)).result()
        self._end_loop()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _note_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, Exception):
            self._translator.note(f"event loop: {context.get('message')}", error)
        else:
            loop.default_exception_handler(context)

    def _call(self, coroutine: Coroutine[Any, Any, None]) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _load(self) -> None:
        self._llm = await self._source.start()
        self.tasks = tuple(await self._llm.get_supported_tasks())
        self._operator.begin_anew()
        if "generate" in self.tasks:
            await self._prompter.start(self._llm)
        self._hung, self._asked_at = False, self._loop.time()
        self._source.share()
        self.healthy = True

    def _begin(self, job: Job) -> None:
        if job.ended:  # the engine has died, or is being unloaded
            return
        try:
            self._set_deadline(job)
            job.task = self._loop.create_task(self._add(job))
        except Exception as error:  # noqa: BLE001 - a request must never take the model down
            self._finish(job, self._translator.refusal(error))

    def _set_deadline(self, job: Job) -> None:
        own = job.request.timeout
        seconds = own / 1e6 or self._pace.deadline
        if not seconds:
            return
        which = f"timeout of {own} us" if own else f"the default timeout of {seconds:.0f} s"
        error = UnavailableError(f"{which} expired before the request had finished")
        job.deadline = self._loop.call_later(seconds, self._abort, job, error)

    async def _add(self, job: Job) -> None:
        try:
            if not self.is_healthy():
                raise UnavailableError(DEAD)  # noqa: TRY301 - the one place that answers
            if isinstance(job.request, OperatorRequest):
                self._finish(job, await self._operator.run(self._llm, job.request, lambda: not job.ended))
                return
            if self._operator.closed:
                raise UnavailableError(ASLEEP)  # noqa: TRY301
            if self._store is not None and job.request.lora_name is not None:
                job.adapter = await self._store.acquire(self._llm, job.request.lora_name)
            collectors = await self._enter(job)
        except Exception as error:  # noqa: BLE001 - a request must never take the model down
            self._finish(job, self._translator.refusal(error))
            if self.is_healthy() and (len(job.ids) > 1 or not isinstance(error, AdapterError)):
                await self._stop(job)  # vLLM has some of its parts, or what it began with before it raised
            return
        finally:
            job.task = None
        if job.ended:  # cancelled or out of time while it was being added
            await self._stop(job)
            return
        job.added = True
        if len(collectors) == 1 and not job.most_numbers:
            vllm_api.attach(collectors[0], lambda item: self._take(job, item))
            return
        gathering = Gathering(len(collectors), lambda item: self._take(job, item), job.most_numbers)
        for number, collector in enumerate(collectors):
            vllm_api.attach(collector, partial(self._gather, job, gathering, number))

    async def _enter(self, job: Job) -> list[Collector]:
        """Add a job to vLLM; a pooling request has a request for each of its parts."""
        request, made = job.request, []
        for name, part in zip(job.ids, getattr(request, "parts", (request,)), strict=True):
            params = job.params
            if getattr(part, "second", None) is not None:
                prompt, params = await self._prompter.make_pair(self._llm, part, params)
            else:
                prompt = await self._prompter.make(self._llm, part)
            if getattr(params, "min_tokens", 0):
                bound_minimum(params, prompt, self.facts().max_tokens)
            told = job.conversation.engine_options(prompt) if job.conversation else {}
            adapter = job.adapter.request if job.adapter else None
            options = {"lora_request": adapter, "priority": request.priority, **job.options, **told}
            made.append(await self._llm.add_request(name, prompt, params, **options))
            if job.ended:
                break
        return made

    def _gather(self, job: Job, gathering: Gathering, number: int, item: Output | Exception) -> None:
        try:
            gathering.take(number, item)
        except Exception as error:  # noqa: BLE001 - as in `_take`
            self._translator.note("an output was not taken", error)
            self._abort(job, InternalError(FAILED))

    def _take(self, job: Job, item: Output | Exception) -> None:
        if job.ended:
            return
        job.moved = self._loop.time()
        job.waiting_since = BEGUN
        try:
            if isinstance(item, AdapterError):
                self._abort(job, item)  # its other parts may go on in vLLM
            elif isinstance(item, Exception):
                own = self._translator.own(item)
                if own is None:
                    self._finish(job, self._translator.loss(item))
                else:
                    self._abort(job, own)  # its other completions may go on in vLLM
            elif (job.several or len(job.ids) > 1) and (error := failure(item)) is not None:
                self._abort(job, error)  # one completion or part has failed; the others go on in vLLM
            elif item.finished:
                self._finish(job, failure(item) or item)
            else:
                self._put(job, item)
        except Exception as error:  # noqa: BLE001 - vLLM's output handler would end, and with it every other request
            self._translator.note("an output was not taken", error)
            with contextlib.suppress(Exception):
                self._abort(job, InternalError(FAILED))

    def _finish(self, job: Job, last: Item) -> None:
        if job.ended:
            return
        job.ended = True
        if job.bulky and not isinstance(last, AdapterError):
            self._unwritten = [*self._unwritten, job]  # before it is forgotten: it is in flight all the time
        self._forget(job)
        if job.deadline is not None:
            job.deadline.cancel()
        try:
            self._put(job, last)
        except Exception as error:  # noqa: BLE001 - nothing else would answer it
            self._translator.note("an answer was not queued", error)
            job.reply.give_up()

    def _forget(self, job: Job) -> None:
        if self._jobs.pop(job.id, None) is not None:
            self._left += len(job.ids)

    def _abort(self, job: Job, error: AdapterError | None) -> None:
        if job.ended:
            return
        if error is not None:
            self._finish(job, error)
        job.ended = True
        self._forget(job)
        if job.task is None and self.is_healthy():  # else `_add` is still running, and checks `ended` itself
            self._loop.create_task(self._stop(job))

    async def _stop(self, job: Job) -> None:
        for name in job.ids:
            await self._llm.abort(name)
            if job.several:
                vllm_api.forget_parent(self._llm, name)

    def _give_up(self) -> None:
        """Cancel what is in flight, now and whenever more has come."""
        self._refuse_rest()
        self._loop.call_later(self._pace.health_period, self._give_up)

    def _refuse_rest(self) -> None:
        for job in self.jobs():
            self._abort(job, UnavailableError(UNLOADED))
        for job in self._unwritten:
            job.refusal = UnavailableError(UNLOADED)

    def _check(self) -> None:
        """Check regularly whether the engine is alive: an idle one dies without an error in any request."""
        if self._ending.is_set():
            return
        try:
            loss = self._loss() if self.healthy else ""
            if loss:
                self._bury(loss)
                if self._restart:
                    self._loop.create_task(self._revive())
                    return
            if self.healthy and self._jobs and self._loop.time() - self._asked_at > self._pace.question_period:
                self._asked_at = math.inf
                self._loop.create_task(self._ask())
            self._refuse_overdue()
            self._note_stuck()
            self._unwritten = [job for job in self._unwritten if not job.reply.closed]
        except Exception as error:  # noqa: BLE001 - the next check may find more
            self._translator.note("the engine could not be checked", error)
        self._loop.call_later(self._pace.health_period, self._check)

    def _loss(self) -> str:
        if self._hung:
            return f"does not answer for {self._silence:.0f} s"
        return self._source.loss() or ("has died" if vllm_api.is_dead(self._llm) else "")

    def _bury(self, loss: str) -> None:
        self.healthy = False
        self._source.retire(hung=self._hung)
        if loss == PARTED:
            self._log.info(f"the engine {loss}")
        else:
            self._log.error(f"the engine {loss}" + (", starting it again" if self._restart else ""))
        for job in self.jobs():
            self._finish(job, UnavailableError(DEAD))
        self._operator.give_up()
        if self._store is not None:
            self._store.give_up()

    async def _ask(self) -> None:
        """Ask EngineCore something while requests are open: one that hangs is healthy to vLLM, and they would wait for ever.

        It answers between two steps of the model, so it may take as long as a step may.
        """
        llm = self._llm
        try:
            await asyncio.wait_for(llm.is_sleeping(), self._silence)
        except asyncio.TimeoutError:
            self._hung = llm is self._llm
        except Exception as error:  # noqa: BLE001 - a dead one is told by `is_dead`, and to ask is no request's matter
            if not vllm_api.is_dead(llm):
                self._translator.note("the engine could not be asked", error)
        finally:
            self._asked_at = self._loop.time()

    def _refuse_overdue(self) -> None:
        """Answer the requests that have been in the queue for too long."""
        limit = self._pace.queue
        if not limit:
            return
        overdue = find_overdue(self.jobs(), self._loop.time() - limit, self._llm)
        for job in overdue:
            text = f"the model has not begun to work on the request after {limit:.0f} s in the queue; try again later"
            self._abort(job, UnavailableError(text))
        if overdue:
            self._log.warning(f"{len(overdue)} requests were refused after {limit:.0f} s in the queue")

    def _note_stuck(self) -> None:
        """Log the requests that have had no output for long, with their state; a whole answer that takes its time is one, too."""
        now = self._loop.time()
        stuck = [job for job in self.jobs() if now - job.moved > self._silence]
        if not stuck:
            return
        for job in stuck:
            job.moved = math.inf
        shown = "; ".join(
            f"{job.id}: {'vLLM has it' if job.task is None else 'it is being added'}, {len(job.pending)} outputs wait to be sent"
            for job in stuck[:_SHOWN]
        )
        self._log.warning(f"{len(stuck)} requests have had no output for {self._silence:.0f} s: {shown}")

    async def _revive(self) -> None:
        attempt = 0
        while not self._ending.is_set():
            began = time.monotonic()
            try:
                self._llm.shutdown()
                await self._load()
            except Exception as error:  # noqa: BLE001 - out of memory, say, until the dead engine's is free again
                delay = self._pace.backoff[min(attempt, len(self._pace.backoff) - 1)]
                attempt += 1
                self._log.error(f"restart {attempt} failed, next one in {delay:.0f} s: {type(error).__name__}: {error}")
                await asyncio.sleep(delay)
            else:
                self._log.info(f"the engine is back after {time.monotonic() - began:.1f} s")
                self._check()
                return

    async def _drain(self, grace_s: float) -> None:
        end = self._loop.time() + grace_s
        while self.in_flight() and self._loop.time() < end:  # noqa: ASYNC110 - once per unload; an event would be set per request
            await asyncio.sleep(0.05)
        self._refuse_rest()
        await asyncio.sleep(0)
        self._source.close()
        self._llm.shutdown()
        if self._store is not None:
            self._store.close()
        rest = [t for t in asyncio.all_tasks(self._loop) if t is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
