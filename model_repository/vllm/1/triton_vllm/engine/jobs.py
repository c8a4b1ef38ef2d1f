"""Begin and end jobs, whichever API they came by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triton_vllm import vllm_api
from triton_vllm.base.errors import DEAD, CancelledError, StoppedError, UnavailableError
from triton_vllm.engine.job import Job
from triton_vllm.engine.ledger import Ledger

if TYPE_CHECKING:
    import asyncio

    from triton_vllm.base.errors import AdapterError
    from triton_vllm.base.limits import Limits
    from triton_vllm.base.protocols import EngineClient, Log
    from triton_vllm.engine.job import Item, Subrequest, Way
    from triton_vllm.engine.outcome import Translator
    from triton_vllm.instances.counts import Counts

# EngineCore may be in a step, and may read the adapter again.
LINGER_S = 30.0
"""How long a replaced adapter stays after its last request, s."""


class Jobs:
    """The jobs of an engine, from their beginning to their end.

    All methods are called in the event loop, unless their docstring says otherwise.

    Args:
        loop: vLLM's event loop.
        translator: logs failures.
        limits: how long a request may take and wait.
        counts: how many requests the instances of the model have.
        log: logs refusals after too long a wait.

    Attributes:
        loop: vLLM's event loop.
        ledger: the jobs.
        llm: the engine that runs the jobs. None if there is no engine.
        why_down: the reason that clients get if there is no living engine.
        unhealthy: whether the engine has failed vLLM's health check.
        last_output_at: when the last output of any job came, in the event loop's time in seconds.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        translator: Translator,
        limits: Limits,
        counts: Counts,
        log: Log,
    ) -> None:
        self.loop = loop
        self._translator = translator
        self._limits = limits
        self._log = log
        self.ledger = Ledger(counts)
        self.llm: EngineClient | None = None
        self.why_down = DEAD
        # The class of the error with that reason.
        self._error_when_down = UnavailableError
        self.unhealthy = False
        self.last_output_at = 0.0
        # The event loop has only weak references to tasks, so these are kept until they end.
        self._stopping: set[asyncio.Task[None]] = set()

    def use(self, llm: EngineClient) -> None:
        """Use this engine from now on; it is the first one, or replaces an engine that was lost."""
        self.unhealthy = False
        self.llm = llm

    def lose(self, reason: str = DEAD, kind: type[UnavailableError] = UnavailableError) -> None:
        """End all jobs with this kind of error and this reason: there is no engine any more."""
        # First, so that the gate in Triton's thread refuses new requests from now on.
        self.why_down = reason
        self._error_when_down = kind
        self.llm = None
        for job in self.ledger.jobs():
            self.abort(job, kind(reason))

    def is_up(self) -> bool:
        """Return whether there is a living, healthy engine; any thread may call it."""
        llm = self.llm
        return llm is not None and not self.unhealthy and not vllm_api.is_dead(llm)

    def engine(self) -> EngineClient:
        """Return the engine.

        Raises:
            UnavailableError: there is no living, healthy one.
        """
        llm = self.llm
        if llm is None or not self.is_up():
            raise self._error_when_down(self.why_down)
        return llm

    def cancel(self, job: Job[Any]) -> None:
        """Stop a job that the client no longer wants or can no longer receive."""
        self.loop.call_soon_threadsafe(self.abort, job, CancelledError("Request was cancelled"))

    def begin(self, delivery: Way) -> Job[Way]:
        """Return a new job, for which another API asks vLLM itself; ``finish`` ends it."""
        job = Job(delivery, waiting_since=self.loop.time())
        self.ledger.begin(job)
        self.set_deadline(job, 0)
        return job

    def note(self, job: Job[Any], subrequest: Subrequest) -> None:
        """Note one of vLLM's own requests for a job of another API; vLLM has taken the request."""
        job.subrequests.append(subrequest)
        if job.ended:
            self._stop_soon(job)

    def note_unhealthy(self, llm: EngineClient) -> None:
        """Note that an engine has failed vLLM's health check."""
        # A lost engine's failure says nothing about the new one.
        self.unhealthy = self.unhealthy or llm is self.llm

    def note_output(self) -> None:
        """Note that vLLM has given an output."""
        self.last_output_at = self.loop.time()

    def finish(self, job: Job[Any]) -> None:
        """Forget a job of another API, because its answer is written or its client is gone."""
        # A task of the application may run on. With an error in the job, it cannot ask vLLM for
        # more. That would count for ever.
        job.error = job.error or CancelledError("Request was cancelled")
        job.ended = True
        job.delivery.give_up()
        self._let_go(job)
        self.ledger.leave(job)

    def refuse_all(self, reason: str) -> None:
        """End all unfinished jobs with this reason, because the model is unloaded."""
        for job in self.ledger.jobs():
            self.abort(job, StoppedError(reason))
        for job in self.ledger.unwritten():
            job.delivery.refuse(StoppedError(reason))

    def refuse_overdue(self) -> None:
        """End the jobs that have been in vLLM's queue for too long."""
        limit = self._limits.max_queue_seconds
        if not limit or self.llm is None:
            return
        overdue = self.ledger.overdue(self.loop.time() - limit, self.llm)
        text = (
            f"the model has not begun to work on the request after {limit} s in the queue; "
            "try again later"
        )
        for job in overdue:
            self.abort(job, UnavailableError(text))
        if overdue:
            self._log.warning(f"{len(overdue)} requests were refused after {limit} s in the queue")

    def abort(self, job: Job[Any], error: AdapterError) -> None:
        """End a job before vLLM has finished it."""
        if job.ended:
            return
        job.error = error
        self.end(job, error)
        # While a task of the runner adds the job, that task looks at ``ended`` itself.
        if job.task is None:
            self._stop_soon(job)

    def set_deadline(self, job: Job[Any], timeout_us: int) -> None:
        """End a job after ``timeout_us``; 0 means the model's default, which may be no timeout."""
        seconds = timeout_us / 1e6 or self._limits.default_timeout_seconds
        if not seconds:
            return
        # The client knows its own timeout by the number and unit that it sent.
        which = f"the default timeout of {seconds} s"
        if timeout_us:
            which = f"timeout of {timeout_us} us"
        error = UnavailableError(f"{which} expired before the request had finished")
        job.deadline = self.loop.call_later(seconds, self.abort, job, error)

    def end(self, job: Job[Any], last: Item) -> None:
        """Give a job its last item."""
        if job.ended:
            return
        job.ended = True
        # An answer that takes long to write counts until then.
        self.ledger.leave(job, unwritten=job.delivery.lasts(last))
        self._let_go(job)
        try:
            job.delivery.end(last)
        except Exception as error:  # noqa: BLE001 - nothing else would answer the request
            self._translator.log_error("an answer was not queued", error)
            job.delivery.give_up()

    def _let_go(self, job: Job[Any]) -> None:
        """Give up what an ended job holds: its deadline and, after a while, its adapter."""
        if job.deadline is not None:
            job.deadline.cancel()
        # The adapter's files must exist until EngineCore knows that the request has ended. The
        # timer holds the object that keeps them.
        if job.adapter is not None:
            self.loop.call_later(LINGER_S, lambda _: None, job.adapter)

    def _stop_soon(self, job: Job[Any]) -> None:
        if self.llm is None:
            return
        task = self.loop.create_task(self.stop(job))
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    async def stop(self, job: Job[Any]) -> None:
        """Make vLLM stop working on a job."""
        llm = self.llm
        # An engine that has failed a health check may still work.
        if llm is None or vllm_api.is_dead(llm):
            return
        for subrequest in job.subrequests:
            await llm.abort(subrequest.id)
            # vLLM's ``abort`` leaves its entry for a request with several completions behind.
            if subrequest.completions > 1:
                vllm_api.forget_parent(llm, subrequest.id)
