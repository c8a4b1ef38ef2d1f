"""The requests that vLLM works on, and which of them have waited for too long."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from triton_vllm import vllm_api
from triton_vllm.operator.request import OperatorRequest

if TYPE_CHECKING:
    from triton_vllm.base.protocols import EngineClient
    from triton_vllm.job import Job

BEGUN = math.inf
"""`Job.waiting_since` of a job that waits no more."""


class InFlight:
    """The jobs in flight.

    Any thread may read. One thread enters jobs, and the event loop's takes them out: each number is written by one thread
    only, so no lock is needed.
    """

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}
        self._entered = 0
        self._left = 0
        self._unwritten: list[Job] = []  # replaced, never changed: other threads read it

    def jobs(self) -> list[Job]:
        """Return the jobs that have not ended."""
        return list(self._jobs.values())  # one C call, so no other thread can change the dict meanwhile

    def unwritten(self) -> list[Job]:
        """Return the ended jobs whose bulky answers wait to be written."""
        return [job for job in self._unwritten if not job.reply.closed]

    def tidy(self) -> None:
        """Forget the jobs whose answers have been written, and what these hold."""
        self._unwritten = self.unwritten()

    def count(self) -> int:
        """Return how many requests these are; each part of a pooling request is one."""
        unwritten = sum(len(job.ids) for job in self._unwritten if not job.reply.closed)
        return self._entered - self._left + unwritten

    def is_busy(self) -> bool:
        """Return whether there are other requests than an operator's."""
        return any(not isinstance(job.request, OperatorRequest) for job in self.jobs())

    def enter(self, job: Job) -> None:
        """Take a job in."""
        self._jobs[job.id] = job
        self._entered += len(job.ids)

    def leave(self, job: Job, *, unwritten: bool = False) -> None:
        """Let a job go, if it is here; `unwritten` keeps it until its reply is closed."""
        if unwritten:
            self._unwritten = [*self._unwritten, job]  # first, so that it is counted all the time
        if self._jobs.pop(job.id, None) is not None:
            self._left += len(job.ids)

    def overdue(self, came: float, llm: EngineClient) -> list[Job]:
        """Return the jobs that have waited since before `came`, in the event loop's time; vLLM is asked about no others.

        An operator's sleep does not count: it waits for the requests in flight, not in vLLM's queue.
        """
        waiting = [job for job in self.jobs() if job.waiting_since < came and not isinstance(job.request, OperatorRequest)]
        return [job for job in waiting if _waits(job, llm)]

    def stuck(self, moved: float) -> list[Job]:
        """Return the jobs without an output since `moved`, in the event loop's time, each job once."""
        stuck = [job for job in self.jobs() if job.moved < moved]
        for job in stuck:
            job.moved = math.inf
        return stuck


def _waits(job: Job, llm: EngineClient) -> bool:
    """Return whether vLLM has not begun to work on a job; one that is still being added waits, too."""
    if not job.added:
        return True
    begun = vllm_api.has_begun(llm, job.id, getattr(job.params, "n", 1))
    if begun is None:  # then only a stream shows it, by its first output
        begun = not getattr(job.request, "stream", False)
    if begun:
        job.waiting_since = BEGUN
    return not begun
