"""Which requests have waited too long for vLLM to begin with them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from triton_vllm import vllm_api
from triton_vllm.operator.request import OperatorRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from triton_vllm.base.protocols import EngineClient
    from triton_vllm.job import Job

BEGUN = math.inf
"""`Job.waiting_since` of a job that waits no more."""


def find_overdue(jobs: Iterable[Job], came: float, llm: EngineClient) -> list[Job]:
    """Return the jobs that wait since before `came`, in the event loop's time; vLLM is asked for no others.

    An operator's sleep waits for the requests in flight, not in vLLM's queue.
    """
    waiting = (job for job in jobs if job.waiting_since < came and not isinstance(job.request, OperatorRequest))
    return [job for job in waiting if _waits(job, llm)]


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
