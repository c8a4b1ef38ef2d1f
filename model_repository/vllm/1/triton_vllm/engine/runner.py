"""Give requests to vLLM and pass on its outputs.

Each request ends with exactly one last item, whatever vLLM does.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

from triton_vllm import vllm_api
from triton_vllm.base.errors import (
    DEAD,
    AdapterError,
    CancelledError,
    InternalError,
    StoppedError,
    UnavailableError,
)
from triton_vllm.engine.cost import bound_cost
from triton_vllm.engine.in_flight import BEGUN, InFlight
from triton_vllm.engine.openai_requests import LINGER_S, OpenAiRequests
from triton_vllm.operator.request import OperatorRequest
from triton_vllm.operator.run import ASLEEP, Operator
from triton_vllm.pooling.gathering import Gathering
from triton_vllm.vllm_api.minimum import bound_minimum
from triton_vllm.vllm_api.refusals import REQUEST_FAILED, failure

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from triton_vllm.answer import Reply
    from triton_vllm.base.limits import Limits
    from triton_vllm.base.protocols import Collector, EngineClient, Item, Log, Output
    from triton_vllm.engine.outcome import Translator
    from triton_vllm.engine.prompts import Prompter
    from triton_vllm.instances.source import Source
    from triton_vllm.job import Job
    from triton_vllm.lora.store import AdapterStore

    Put = Callable[[Reply, Item], None]


class Runner:
    """Runs jobs in vLLM.

    ``submit`` and ``cancel`` are for other threads. All other methods are called in the event loop,
    unless their docstring says otherwise.

    Args:
        loop: vLLM's event loop.
        prompter: makes prompts from requests.
        translator: turns vLLM's exceptions into errors for clients.
        limits: how long a request may take and wait.
        source: what the instances of the model know of each other.
        log: logs refusals after too long a wait.

    Attributes:
        llm: the engine that runs the jobs. None if there is no engine.
        why_down: what clients are told if there is no living engine.
        in_flight: the jobs.
        moved: when the last output of any job came, in the event loop's time in seconds.
        openai_requests: the requests to the OpenAI port.
        operator: runs operator requests.
        store: the LoRA adapters. None if there are no adapters.
        unhealthy: whether the engine has failed vLLM's health check.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        prompter: Prompter,
        translator: Translator,
        limits: Limits,
        source: Source,
        log: Log,
    ) -> None:
        self._loop = loop
        self._prompter = prompter
        self._translator = translator
        self._limits = limits
        self._log = log
        # Set by ``deliver_to``, because the outbox is made after the engine.
        self._put: Put
        self.store: AdapterStore | None = None
        self._facts = vllm_api.Facts()
        self.llm: EngineClient | None = None
        self.why_down = DEAD
        self._kind_down = UnavailableError
        self.in_flight = InFlight(source.counts)
        self.moved = 0.0

        def note_output() -> None:
            self.moved = loop.time()

        self.openai_requests = OpenAiRequests(
            loop, translator, limits, note_output, self.in_flight.tell, lambda: self.llm
        )
        self.in_flight.openai_requests = self.openai_requests
        self.operator = Operator(self.in_flight.count_of_all, source.sleep_state, log)
        self.unhealthy = False
        # Set by ``check_health``.
        self._when_unhealthy: Callable[[], None] | None = None

    def check_health(self, when_unhealthy: Callable[[], None]) -> None:
        """Ask vLLM before each job whether its engine is healthy, as the official backend does.

        Args:
            when_unhealthy: called in another thread for each job that finds it is not, before the
                job gets its error.
        """
        self._when_unhealthy = when_unhealthy

    def deliver_to(self, put: Put, store: AdapterStore | None) -> None:
        """Set the receiver of outputs and the source of adapters, before the first job."""
        self._put = put
        self.store = store
        self.operator.store = store

    def use(self, llm: EngineClient, facts: vllm_api.Facts) -> None:
        """Use this engine from now on; it is the first one, or replaces an engine that was lost."""
        self._facts = facts
        self.unhealthy = False
        self.llm = llm

    def lose(self, reason: str = DEAD, kind: type[UnavailableError] = UnavailableError) -> None:
        """End all jobs with this kind of error and this reason: there is no engine any more."""
        # First, so that the gate in Triton's thread refuses new requests from now on.
        self.why_down = reason
        self._kind_down = kind
        self.llm = None
        for job in self.in_flight.jobs():
            self._finish(job, kind(reason))
        self.openai_requests.end_all(kind(reason))
        self.operator.give_up()
        if self.store is not None:
            self.store.give_up()

    def is_up(self) -> bool:
        """Return whether there is a living, healthy engine; any thread may call it."""
        llm = self.llm
        return llm is not None and not self.unhealthy and not vllm_api.is_dead(llm)

    def submit(self, job: Job) -> None:
        """Take a job from another thread; its outputs go to ``put``."""
        job.moved = job.waiting_since = self._loop.time()
        # Done here, not in the loop: the watch is woken next. It would find nothing in flight and
        # sleep again.
        self.in_flight.enter(job)
        self._loop.call_soon_threadsafe(self._begin, job)

    def cancel(self, job: Job) -> None:
        """Stop a job that the client no longer wants or can no longer receive."""
        self._loop.call_soon_threadsafe(self._abort, job, CancelledError("Request was cancelled"))

    def refuse_all(self, reason: str) -> None:
        """End all unfinished jobs with this reason, because the model is unloaded."""
        for job in self.in_flight.jobs():
            self._abort(job, StoppedError(reason))
        for job in self.in_flight.unwritten():
            job.reply.refusal = StoppedError(reason)
        self.openai_requests.end_all(StoppedError(reason))

    def refuse_overdue(self) -> None:
        """End the jobs that have been in vLLM's queue for too long."""
        limit = self._limits.max_queue_seconds
        if not limit or self.llm is None:
            return
        came = self._loop.time() - limit
        overdue = self.in_flight.overdue(came, self.llm)
        requests = self.openai_requests.overdue(came, self.llm)
        text = (
            f"the model has not begun to work on the request after {limit} s in the queue; "
            "try again later"
        )
        for job in overdue:
            self._abort(job, UnavailableError(text))
        for request in requests:
            self.openai_requests.end(request, UnavailableError(text))
        count = len(overdue) + len(requests)
        if count:
            self._log.warning(f"{count} requests were refused after {limit} s in the queue")

    def _begin(self, job: Job) -> None:
        # The engine may have died since, or is being unloaded.
        if job.ended:
            return
        try:
            self._set_deadline(job)
            job.task = self._loop.create_task(self._add(job))
        except Exception as error:  # noqa: BLE001 - a request must never take the model down
            self._finish(job, self._translator.refusal(error))

    def _set_deadline(self, job: Job) -> None:
        timeout_us = job.request.timeout
        seconds = timeout_us / 1e6 or self._limits.default_timeout_seconds
        if not seconds:
            return
        # The client knows its own timeout by the number and unit that it sent.
        which = f"the default timeout of {seconds} s"
        if timeout_us:
            which = f"timeout of {timeout_us} us"
        error = UnavailableError(f"{which} expired before the request had finished")
        job.deadline = self._loop.call_later(seconds, self._abort, job, error)

    async def _add(self, job: Job) -> None:
        try:
            llm = await self._healthy_engine()
            if isinstance(job.request, OperatorRequest):
                self._finish(job, await self.operator.run(llm, job.request, lambda: not job.ended))
                return
            # The engine may have been sent to sleep after the request was admitted.
            if self.operator.closed:
                raise UnavailableError(ASLEEP)  # noqa: TRY301
            if self.store is not None and job.request.lora_name is not None:
                job.adapter = await self.store.acquire(llm, job.request.lora_name)
            collectors = await self._enter(llm, job)
        except Exception as error:  # noqa: BLE001 - a request must never take the model down
            self._finish(job, self._translator.refusal(error))
            # vLLM has some of the job's parts, or a request that it began before it raised.
            if len(job.ids) > 1 or not isinstance(error, AdapterError):
                await self._stop(job)
            return
        finally:
            job.task = None
        # The job may have been cancelled, or its time may have run out, while it was being added.
        if job.ended:
            await self._stop(job)
            return
        job.added = True
        take = partial(self._take, job)
        if len(collectors) == 1 and not job.most_numbers:
            vllm_api.attach(collectors[0], take)
            return
        gathering = Gathering(len(collectors), take, job.most_numbers)
        for number, collector in enumerate(collectors):
            vllm_api.attach(collector, partial(self._gather, job, gathering, number))

    async def _healthy_engine(self) -> EngineClient:
        """Return the engine; raise UnavailableError if there is no healthy one."""
        llm = self.llm
        if llm is None or not self.is_up():
            raise self._kind_down(self.why_down)
        if self._when_unhealthy is None:
            return llm
        try:
            await llm.check_health()
        # Whatever vLLM raises, it says that the engine is not healthy.
        except Exception as error:  # noqa: BLE001
            self._translator.note("vLLM's health check failed", error)
            # A lost engine's failure says nothing about the new one.
            self.unhealthy = self.unhealthy or llm is self.llm
            # In a thread: it waits for the server, which may be loading another model.
            await self._loop.run_in_executor(None, self._when_unhealthy)
            raise UnavailableError(DEAD) from None
        return llm

    async def _enter(self, llm: EngineClient, job: Job) -> list[Collector]:
        """Add a job to vLLM; a pooling request becomes one request for each of its parts."""
        request = job.request
        collectors = []
        for name, part in zip(job.ids, getattr(request, "parts", (request,)), strict=True):
            params = job.params
            if getattr(part, "second", None) is not None:
                prompt, params = await self._prompter.make_pair(llm, part, params)
            else:
                prompt = await self._prompter.make(llm, part)
            facts = self._facts
            bound_cost(params, prompt, self._limits, facts.max_tokens, facts.vocabulary)
            if getattr(params, "min_tokens", 0):
                bound_minimum(params, prompt, self._facts.max_tokens)
            options = {"priority": request.priority, **job.options}
            options["lora_request"] = job.adapter.request if job.adapter else None
            if job.conversation:
                options |= job.conversation.engine_options(prompt)
            collectors.append(await llm.add_request(name, prompt, params, **options))
            # The remaining parts would be stopped at once.
            if job.ended:
                break
        return collectors

    def _gather(
        self, job: Job, gathering: Gathering, number: int, item: Output | Exception
    ) -> None:
        try:
            gathering.take(number, item)
        except Exception as error:  # noqa: BLE001 - as in _take
            self._translator.note("an output was not taken", error)
            self._abort(job, InternalError(REQUEST_FAILED))

    def _take(self, job: Job, item: Output | Exception) -> None:
        if job.ended:
            return
        job.moved = self.moved = self._loop.time()
        job.waiting_since = BEGUN
        try:
            # If one completion or part of a job has failed, the others still run in vLLM. So those
            # jobs are aborted, not only finished.
            if isinstance(item, AdapterError):
                self._abort(job, item)
            elif isinstance(item, Exception):
                own = self._translator.own(item)
                if own is None:
                    self._finish(job, self._translator.loss(item))
                else:
                    self._abort(job, own)
            elif (job.several or len(job.ids) > 1) and (error := failure(item)) is not None:
                self._abort(job, error)
            elif item.finished:
                self._finish(job, failure(item) or item)
            else:
                self._put(job.reply, item)
        except Exception as error:  # noqa: BLE001
            # It would end vLLM's output handler, and with it all other requests.
            self._translator.note("an output was not taken", error)
            with contextlib.suppress(Exception):
                self._abort(job, InternalError(REQUEST_FAILED))

    def _finish(self, job: Job, last: Item) -> None:
        if job.ended:
            return
        job.ended = True
        job.reply.complete = True
        self.in_flight.leave(job, unwritten=job.reply.bulky and not isinstance(last, AdapterError))
        if job.deadline is not None:
            job.deadline.cancel()
        # The adapter's files must exist until EngineCore knows that the request has ended. The
        # timer holds the object that keeps them.
        if job.adapter is not None:
            self._loop.call_later(LINGER_S, lambda _: None, job.adapter)
        try:
            self._put(job.reply, last)
        except Exception as error:  # noqa: BLE001 - nothing else would answer the request
            self._translator.note("an answer was not queued", error)
            job.reply.give_up()

    def _abort(self, job: Job, error: AdapterError) -> None:
        """End a job before vLLM has finished it."""
        if job.ended:
            return
        self._finish(job, error)
        # While ``_add`` runs, it checks ``ended`` itself.
        if job.task is None:
            self._loop.create_task(self._stop(job))

    async def _stop(self, job: Job) -> None:
        """Make vLLM stop working on a job."""
        llm = self.llm
        # An engine that has failed a health check may still work.
        if llm is None or vllm_api.is_dead(llm):
            return
        for name in job.ids:
            await llm.abort(name)
            # vLLM's ``abort`` leaves its entry for a request with several completions behind.
            if job.several:
                vllm_api.forget_parent(llm, name)
