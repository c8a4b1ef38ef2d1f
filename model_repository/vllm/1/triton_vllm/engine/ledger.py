"""Keep the jobs that vLLM works on, of both APIs, and find those that have waited for too long."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any

from triton_vllm import vllm_api
from triton_vllm.engine.job import BEGUN

if TYPE_CHECKING:
    from triton_vllm.base.protocols import EngineClient
    from triton_vllm.engine.job import Job
    from triton_vllm.instances.counts import Counts


class Ledger:
    """The jobs in flight.

    Any thread may read. Triton's thread enters its jobs, the event loop's thread does all else.
    Each number of this object is written by only one of them, so none needs a lock.

    Args:
        counts: where the model's other instances see how many there are.
    """

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        # Both threads write the number for the other instances. The older one must not come last.
        self._telling = threading.Lock()
        # Two threads add to it, each under its own keys: one step each, as for ``jobs``.
        self._jobs: dict[str, Job[Any]] = {}
        # Written by Triton's thread.
        self._entered = 0
        # Written by the event loop: what came, grew and left there. Negative, as a rule.
        self._changed = 0
        # Replaced, never changed: other threads read it.
        self._unwritten: list[Job[Any]] = []

    def jobs(self) -> list[Job[Any]]:
        """Return the jobs that have not ended."""
        # One C call, so no other thread can change the dict meanwhile.
        return list(self._jobs.values())

    def watched(self) -> list[Job[Any]]:
        """Return the jobs about whose clients the server must be asked."""
        return [job for job in self.jobs() if job.delivery.is_watched]

    def unwritten(self) -> list[Job[Any]]:
        """Return the ended jobs whose answers are not written yet."""
        return [job for job in self._unwritten if not job.delivery.closed]

    def tidy(self) -> None:
        """Forget the jobs whose answers have been written, and free their memory."""
        self._unwritten = self.unwritten()
        self.tell()

    def count(self) -> int:
        """Return the number of requests; each part and each completion of a request counts.

        Operator requests do not count.
        """
        return self._entered + self._changed + sum(job.weight for job in self.unwritten())

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

    def enter(self, job: Job[Any]) -> None:
        """Add a job; for Triton's thread."""
        self._jobs[job.id] = job
        self._entered += job.weight
        self.tell()

    def begin(self, job: Job[Any]) -> None:
        """Add a job; for the event loop, as all that follows."""
        self._jobs[job.id] = job
        self._changed += job.weight
        self.tell()

    def weigh(self, job: Job[Any], count: int) -> None:
        """Count ``count`` more completions or inputs that vLLM is asked for.

        The first one of a job takes the place with which the job began.
        """
        job.asked += count
        more = max(job.asked - job.weight, 0)
        job.weight += more
        self._changed += more
        self.tell()

    def leave(self, job: Job[Any], *, unwritten: bool = False) -> None:
        """Remove a job, if it is here; ``unwritten`` keeps it until its delivery is closed."""
        # Added here before it is removed there, so that the job always counts.
        if unwritten:
            self._unwritten = [*self._unwritten, job]
        if self._jobs.pop(job.id, None) is not None:
            self._changed -= job.weight
        self.tell()

    def overdue(self, came: float, llm: EngineClient) -> list[Job[Any]]:
        """Return the jobs that have waited since before ``came``, in the event loop's time in s."""
        # vLLM is asked last, so only about old jobs.
        return [job for job in self.jobs() if job.waiting_since < came and _waits(job, llm)]

    def stuck(self, since: float) -> list[Job[Any]]:
        """Return the jobs without an output since ``since``, in the event loop's time in s.

        Each job is returned only once.
        """
        stuck = [job for job in self.jobs() if job.silent_since < since]
        for job in stuck:
            job.silent_since = math.inf
        return stuck


def _waits(job: Job[Any], llm: EngineClient) -> bool:
    """Return whether vLLM has not begun to work on a job; if it has, note that in the job."""
    # It is being added to vLLM.
    if job.task is not None or not job.subrequests:
        return True
    for subrequest in job.subrequests:
        begun = vllm_api.has_begun(llm, subrequest.id, subrequest.completions)
        # A vLLM that does not say so returns None. Then a stream waits until its first output. An
        # answer without a stream has only one output, at its end, so it counts as begun.
        may_have_begun = begun or (begun is None and not job.streams)
        if may_have_begun:
            job.waiting_since = BEGUN
            return False
    return True
