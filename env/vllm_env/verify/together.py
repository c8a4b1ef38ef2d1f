"""Run jobs at the same time: most of them wait for an interpreter that imports vLLM or torch."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from vllm_env.base.process import ended_together


def together(*checks: Callable[[], Any], at_once: int | None = None) -> list[Any]:
    """Run checks in threads, and return their results in the same order.

    If several fail, this raises the error of the first one in this order. After an error or a
    Ctrl-C, the programs of the others are ended, and checks that wait do not begin.

    Args:
        *checks: the checks.
        at_once: how many may run at the same time. None for all.
    """
    # A thread would otherwise neither report to the user's console nor be in the group of programs.
    with ThreadPoolExecutor(at_once or len(checks)) as pool, ended_together():
        running = [pool.submit(contextvars.copy_context().run, check) for check in checks]
        try:
            return [check.result() for check in running]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@contextlib.contextmanager
def beside(job: Callable[[], Any]) -> Iterator[Future[Any]]:
    """Run a job in a thread while the block runs, and yield its future.

    After the block, the job is done. If the block fails, the job's programs are ended.
    """
    with ThreadPoolExecutor(1) as pool, ended_together():
        yield pool.submit(contextvars.copy_context().run, job)
