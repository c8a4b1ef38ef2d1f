"""Keep the requests that vLLM works on, and find those that have waited for too long."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING

from triton_vllm import vllm_api
from triton_vllm.operator.request import OperatorRequest

if TYPE_CHECKING:
    from triton_vllm.base.protocols import EngineClient
    from triton_vllm.engine.openai_requests import OpenAiRequests
    from triton_vllm.instances.counts import Counts
    from triton_vllm.job import Job

BEGUN = math.inf
"""``Job.waiting_since`` of a job that no longer waits."""


class InFlight:
    """The jobs in flight.

    Any thread may read. One thread adds jobs, and the event loop's thread removes them. Each number
    of this object is written by only one thread, so none needs a lock.

    Args:
        counts: where the model's other instances see how many there are.

    Attributes:
        openai_requests: the requests to the OpenAI port. Set by the runner.
    """

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        # Both threads write the number for the other instances. The older one must not come last.
        self._telling = threading.Lock()
        self.openai_requests: OpenAiRequests | None = None
        self._jobs: dict[str, Job] = {}
        self._entered = 0
        self._left = 0
        # Replaced, never changed: other threads read it.
        self._unwritten: list[Job] = []

    def jobs(self) -> list[Job]:
        """Return the jobs that have not ended."""
        # One C call, so no other thread can change the dict meanwhile.
        return list(self._jobs.values())

    def unwritten(self) -> list[Job]:
        """Return the ended jobs whose bulky answers are not written yet."""
        return [job for job in self._unwritten if not job.reply.closed]

    def tidy(self) -> None:
        """Forget the jobs whose answers have been written, and free their memory."""
        self._unwritten = self.unwritten()
        self.tell()

    def count(self) -> int:
        """Return the number of requests; each part and each completion of a request counts.

        Operator requests do not count.
        """
        others = self.openai_requests.weight if self.openai_requests is not None else 0
        return self._entered - self._left + sum(job.weight for job in self.unwritten()) + others

    def count_of_all(self) -> int:
        """Return the same number for all instances of the model together."""
        return self.count() + self._counts.others()

    def tell(self) -> None:
        """Tell the other instances how many requests there are."""
        if not self._counts.alone:
            with self._telling:
                self._counts.note(self.count())

    def is_empty(self) -> bool:
        """Return whether nothing is in flight in this instance, not even an operator request."""
        return not self._jobs and not self.count()

    def enter(self, job: Job) -> None:
        """Add a job."""
        self._jobs[job.id] = job
        self._entered += job.weight
        self.tell()

    def leave(self, job: Job, *, unwritten: bool = False) -> None:
        """Remove a job, if it is here; ``unwritten`` keeps it until its reply is closed."""
        # Added here before it is removed there, so that the job always counts.
        if unwritten:
            self._unwritten = [*self._unwritten, job]
        if self._jobs.pop(job.id, None) is not None:
            self._left += job.weight
        self.tell()

    def overdue(self, came: float, llm: EngineClient) -> list[Job]:
        """Return the jobs that have waited since before ``came``, in the event loop's time in s."""
        # vLLM is asked last, so only about old jobs. An operator's sleep is left out: it waits for
        # the requests in flight, not in vLLM's queue.
        return [
            job
            for job in self.jobs()
            if job.waiting_since < came
            and not isinstance(job.request, OperatorRequest)
            and _waits(job, llm)
        ]

    def stuck(self, moved: float) -> list[Job]:
        """Return the jobs without an output since ``moved``, in the event loop's time in s.

        Each job is returned only once.
        """
        stuck = [job for job in self.jobs() if job.moved < moved]
        for job in stuck:
            job.moved = math.inf
        return stuck


def _waits(job: Job, llm: EngineClient) -> bool:
    """Return whether vLLM has not begun to work on a job; a job that is being added waits, too."""
    if not job.added:
        return True
    begun = vllm_api.has_begun(llm, job.id, getattr(job.params, "n", 1))
    # If vLLM does not say so, only a stream shows it, with its first output.
    if begun is None:
        begun = not getattr(job.request, "stream", False)
    if begun:
        job.waiting_since = BEGUN
    return not begun
