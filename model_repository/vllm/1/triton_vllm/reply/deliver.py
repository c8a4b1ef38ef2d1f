"""Make one response from the outputs of a job that have queued up."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from triton_vllm.base import official
from triton_vllm.base.errors import AdapterError, CancelledError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from triton_vllm.base.protocols import Item, Log
    from triton_vllm.job import Job


class Delivery:
    """Build and send responses; `deliver` is called by the outbox, in the job's sender thread.

    Args:
        drop: called with a job to which nothing can be sent any more.
        log: told why.
    """

    def __init__(self, drop: Callable[[Job], None], log: Log) -> None:
        self._drop = drop
        self._log = log

    def deliver(self, job: Job, items: Sequence[Item]) -> None:
        """Send one response for all items, consecutive outputs, and an error at their end after them. Never raises."""
        last = items[-1]
        try:
            if job.bulky and not isinstance(last, AdapterError):
                last = _refusal(job) or last
            if isinstance(last, AdapterError):
                if len(items) > 1 and not isinstance(last, CancelledError):
                    job.reply.send(job.assembler.build(items[:-1]), final=False)
                self._fail(job, last)
            else:
                self._send(job, items, final=last.finished)
        except Exception as error:  # noqa: BLE001 - the next job must be served
            job.reply.give_up()
            with contextlib.suppress(Exception):  # the log goes through the shared memory that may be full
                self._log.error(f"response not sent: {type(error).__name__}: {error}")
            with contextlib.suppress(Exception):  # the event loop may be closed
                self._drop(job)

    def _send(self, job: Job, items: Sequence[Item], *, final: bool) -> None:
        try:
            tensors = job.assembler.build(items)
        except AdapterError as error:  # what the model has answered cannot be sent
            job.reply.fail(error)
            if not final:
                self._drop(job)
        else:
            job.reply.send(tensors, final=final)

    def _fail(self, job: Job, error: AdapterError) -> None:
        if not isinstance(error, CancelledError):
            job.reply.fail(error)
            return
        with contextlib.suppress(Exception):  # the log goes through the shared memory that may be full
            self._log.info(official.CANCELLING)
        job.reply.fail(error)
        with contextlib.suppress(Exception):
            self._log.info(official.CANCELLED)


def _refusal(job: Job) -> AdapterError | None:
    """Return what is to be sent in place of an answer that takes seconds to write, after a wait for others like it."""
    return job.refusal or (CancelledError("Request was cancelled") if job.reply.is_cancelled() else None)
