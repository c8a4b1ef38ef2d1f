"""Give requests to vLLM and pass on its outputs.

Each request ends with exactly one last item, whatever vLLM does.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

from triton_vllm import vllm_api
from triton_vllm.base.errors import (
    DEAD,
    AdapterError,
    InternalError,
    UnavailableError,
)
from triton_vllm.engine import cost
from triton_vllm.engine.job import BEGUN, Job, Subrequest
from triton_vllm.pooling.gathering import Gathering
from triton_vllm.vllm_api.refusals import REQUEST_FAILED, failure

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from triton_vllm.base.limits import Limits
    from triton_vllm.base.protocols import Collector, EngineClient, Output
    from triton_vllm.engine.job import Way
    from triton_vllm.engine.jobs import Jobs
    from triton_vllm.engine.order import Order
    from triton_vllm.engine.outcome import Translator
    from triton_vllm.engine.prompts import Prompter
    from triton_vllm.lora.store import AdapterStore
    from triton_vllm.operator.request import OperatorRequest
    from triton_vllm.operator.run import Operator

    Work = Callable[[], Coroutine[Any, Any, None]]


class Runner:
    """Runs jobs in vLLM.

    ``submit`` and ``operate`` are for another thread. All other methods are called in the event
    loop.

    Args:
        jobs: begins and ends jobs.
        prompter: makes prompts from requests.
        translator: turns vLLM's exceptions into errors for clients.
        limits: how much a request may ask for.
        operator: runs operator requests.
        store: the LoRA adapters. None if there are no adapters.

    Attributes:
        operator: runs operator requests.
        store: the LoRA adapters. None if there are no adapters.
    """

    def __init__(
        self,
        jobs: Jobs,
        prompter: Prompter,
        translator: Translator,
        limits: Limits,
        operator: Operator,
        store: AdapterStore | None,
    ) -> None:
        self._jobs = jobs
        self._loop = jobs.loop
        self._prompter = prompter
        self._translator = translator
        self._limits = limits
        self.operator = operator
        self.store = store
        # Nothing is known of the model before ``use`` gives the engine.
        self._facts = vllm_api.Facts()
        # Set by ``check_health``.
        self._when_unhealthy: Callable[[], None] | None = None

    def check_health(self, when_unhealthy: Callable[[], None]) -> None:
        """Ask vLLM before each job whether its engine is healthy, as the official backend does.

        Args:
            when_unhealthy: called in another thread for each job that finds it is not, before the
                job gets its error.
        """
        self._when_unhealthy = when_unhealthy

    def use(self, llm: EngineClient, facts: vllm_api.Facts) -> None:
        """Use this engine from now on; it is the first one, or replaces an engine that was lost."""
        self._facts = facts
        self._jobs.use(llm)

    def lose(self, reason: str = DEAD, kind: type[UnavailableError] = UnavailableError) -> None:
        """End all jobs with this kind of error and this reason: there is no engine any more."""
        self._jobs.lose(reason, kind)
        self.operator.give_up()
        if self.store is not None:
            self.store.give_up()

    def submit(self, order: Order, delivery: Way) -> Job[Way]:
        """Take what another thread asks of vLLM, and return its job."""
        now = self._loop.time()
        job = Job(
            delivery, order.weight, streams=order.streams, silent_since=now, waiting_since=now
        )
        self._enter(job, order.timeout, partial(self._add, job, order))
        return job

    def operate(self, request: OperatorRequest, delivery: Way) -> Job[Way]:
        """Take what another thread asks of the engine itself, and return its job."""
        # It waits for the requests in flight, not in vLLM's queue.
        job = Job(delivery, 0, silent_since=self._loop.time())
        self._enter(job, request.timeout, partial(self._operate, job, request))
        return job

    def _enter(self, job: Job[Any], timeout: int, work: Work) -> None:
        """Count a job, in the caller's thread, and let the event loop begin it."""
        # Done here, not in the loop: the watch is woken next. It would find nothing in flight and
        # sleep again.
        self._jobs.ledger.enter(job)
        self._loop.call_soon_threadsafe(self._begin, job, timeout, work)

    def _begin(self, job: Job[Any], timeout: int, work: Work) -> None:
        """Start a job's task and its timeout.

        Args:
            job: the job. It may have ended since it was entered.
            timeout: microseconds. 0 means the model's default.
            work: makes the coroutine that the task runs.
        """
        # The engine may have died since, or is being unloaded.
        if job.ended:
            return
        try:
            self._jobs.set_deadline(job, timeout)
            job.task = self._loop.create_task(work())
        except Exception as error:  # noqa: BLE001 - a request must never take the model down
            self._jobs.end(job, self._translator.refusal(error))

    async def _operate(self, job: Job[Any], request: OperatorRequest) -> None:
        """Run an operator request, and end its job with the result or an error."""
        try:
            llm = await self._healthy_engine()
            self._jobs.end(job, await self.operator.run(llm, request, lambda: not job.ended))
        except Exception as error:  # noqa: BLE001 - a request must never take the model down
            self._jobs.end(job, self._translator.refusal(error))
        finally:
            job.task = None

    async def _add(self, job: Job[Any], order: Order) -> None:
        """Give a job's prompts to vLLM, and let vLLM's outputs come to this object.

        If that fails, the job ends with an error.
        """
        # 1) Give vLLM the prompts.
        try:
            llm = await self._healthy_engine()
            # The engine may have been sent to sleep after the request was admitted.
            self.operator.require_open()
            if self.store is not None and order.lora_name is not None:
                job.adapter = await self.store.acquire(llm, order.lora_name)
            collectors = await self._add_prompts(llm, job, order)
        except Exception as error:  # noqa: BLE001 - a request must never take the model down
            self._jobs.end(job, self._translator.refusal(error))
            # vLLM may have some of the job's prompts, or a request that it began before it raised.
            await self._jobs.stop(job)
            return
        finally:
            job.task = None
        # The job may have been cancelled, or its time may have run out, while it was being added.
        if job.ended:
            await self._jobs.stop(job)
            return
        # 2) Take the outputs of a request that generates, which has one prompt.
        take = partial(self._take_output, job)
        if order.most_numbers is None:
            vllm_api.attach(collectors[0], take)
            return
        # 3) Join the outputs of a pooling request: one for each of its prompts.
        done = partial(self._jobs.end, job)
        gathering = Gathering(len(collectors), done, take, order.most_numbers)
        for number, collector in enumerate(collectors):
            vllm_api.attach(collector, partial(self._gather_output, job, gathering, number))

    async def _healthy_engine(self) -> EngineClient:
        """Return the engine, after asking vLLM for its health if ``check_health`` has been called.

        Raises:
            UnavailableError: there is no healthy engine.
        """
        jobs = self._jobs
        llm = jobs.engine()
        if self._when_unhealthy is None:
            return llm
        try:
            await llm.check_health()
        # Whatever vLLM raises, it says that the engine is not healthy.
        except Exception as error:  # noqa: BLE001
            self._translator.log_error("vLLM's health check failed", error)
            jobs.note_unhealthy(llm)
            # In a thread: it waits for the server, which may be loading another model.
            await self._loop.run_in_executor(None, self._when_unhealthy)
            raise UnavailableError(DEAD) from None
        return llm

    async def _add_prompts(self, llm: EngineClient, job: Job[Any], order: Order) -> list[Collector]:
        """Give vLLM each prompt as a request of its own; return their collectors in the same order.

        There are fewer collectors than prompts if the job has ended meanwhile.

        Raises:
            Exception: vLLM's own exception, or an AdapterError. vLLM may have some of the prompts.
        """
        collectors = []
        for number, prompt in enumerate(order.prompts):
            made, params = await self._prompter.make(llm, prompt, order.params)
            cost.bound(job, params, made, self._limits, self._facts)
            options = {"priority": order.priority, **order.options}
            options["lora_request"] = job.adapter.request if job.adapter else None
            if order.conversation:
                options |= order.conversation.engine_options(made)
            request_id = f"{job.id}.{number}" if number else job.id
            # Noted before vLLM has it: it may keep what it has begun when it raises.
            job.subrequests.append(Subrequest(request_id, order.completions))
            collectors.append(await llm.add_request(request_id, made, params, **options))
            # The remaining prompts would be stopped at once.
            if job.ended:
                break
        return collectors

    def _gather_output(
        self, job: Job[Any], gathering: Gathering, number: int, item: Output | Exception
    ) -> None:
        """Take the only output, or the exception, of one prompt of a pooling job.

        vLLM calls this. It never raises. The job ends when all its prompts have their outputs.
        """
        self._jobs.note_output()
        try:
            gathering.take(number, item)
        except Exception as error:  # noqa: BLE001 - as in _take_output
            self._translator.log_error("an output was not taken", error)
            self._jobs.abort(job, InternalError(REQUEST_FAILED))

    def _take_output(self, job: Job[Any], item: Output | Exception) -> None:
        """Pass a job's output on to its delivery; the last output or an exception ends the job.

        vLLM calls this. It never raises.
        """
        if job.ended:
            return
        self._jobs.note_output()
        job.silent_since = self._jobs.last_output_at
        job.waiting_since = BEGUN
        try:
            # If one completion or part of a job has failed, the others still run in vLLM. So those
            # jobs are aborted, not only finished.
            if isinstance(item, AdapterError):
                self._jobs.abort(job, item)
            elif isinstance(item, Exception):
                own = self._translator.own(item)
                # All requests have got this exception, and vLLM works on none of them any more.
                if own is None:
                    self._jobs.end(job, self._translator.loss(item))
                else:
                    self._jobs.abort(job, own)
            # A failed output of one completion is not the last one of the job.
            elif job.weight > 1 and (error := failure(item)) is not None:
                self._jobs.abort(job, error)
            elif item.finished:
                self._jobs.end(job, failure(item) or item)
            else:
                job.delivery.put(item)
        except Exception as error:  # noqa: BLE001
            # It would end vLLM's output handler, and with it all other requests.
            self._translator.log_error("an output was not taken", error)
            with contextlib.suppress(Exception):
                self._jobs.abort(job, InternalError(REQUEST_FAILED))
