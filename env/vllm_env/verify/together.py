"""Run checks at the same time: most of them wait for an interpreter that imports vLLM."""

import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vllm_env.base.process import ended_together


def together(*checks: Callable[[], Any]) -> list[Any]:
    """Run checks in a thread each, and return their results in the same order.

    If several fail, this raises the error of the first one in this order. After an error or a
    Ctrl-C, the programs of the others are ended.
    """
    # A thread would otherwise neither report to the user's console nor be in the group of programs.
    with ThreadPoolExecutor(len(checks)) as pool, ended_together():
        running = [pool.submit(contextvars.copy_context().run, check) for check in checks]
        return [check.result() for check in running]
