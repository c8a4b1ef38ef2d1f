"""Checks that run at the same time, with real programs."""

from __future__ import annotations

import sys
import threading
from functools import partial
from typing import TYPE_CHECKING

import pytest

from support.listener import Listener
from support.patience import LIMIT
from vllm_env.base import report
from vllm_env.base.errors import CommandError, VllmEnvError
from vllm_env.base.process import run
from vllm_env.base.report import reporting_to
from vllm_env.verify.together import beside, together

if TYPE_CHECKING:
    from pathlib import Path

FOR_EVER = [sys.executable, "-c", "import sys, signal; print('runs', flush=True); signal.pause()"]


def test_the_results_come_in_the_order_of_the_checks() -> None:
    """Although the first one ends last: each waits for the next."""
    ended = [threading.Event() for _ in range(3)]
    ended[2].set()

    def check(number: int) -> int:
        if number < 2:
            assert ended[number + 1].wait(LIMIT)
        ended[number].set()
        return number

    assert together(*(partial(check, number) for number in range(3))) == [0, 1, 2]


def test_a_check_reports_to_the_users_console() -> None:
    """A thread would otherwise have a console of its own, which ignores --quiet."""
    console = Listener()
    with reporting_to(console):
        together(partial(report.step, "heard"))
    assert console.heard == ["heard"]


def test_a_failure_ends_the_programs_of_the_others() -> None:
    """Also one that is started after it: the thread goes on until its next program."""
    runs = threading.Event()
    after: list[BaseException] = []

    def fails() -> None:
        assert runs.wait(LIMIT)
        raise VllmEnvError("It is broken.")

    def two_programs() -> None:
        for _ in range(2):
            try:
                run(FOR_EVER, what="wait", on_line=lambda _: runs.set())
            except CommandError as error:
                after.append(error)

    with pytest.raises(VllmEnvError, match=r"It is broken\."):
        together(fails, two_programs)
    assert len(after) == 2


def test_of_two_failures_the_first_check_counts() -> None:
    """It is the cheaper one, and its message is closer to the cause."""
    second = threading.Event()

    def check(number: int) -> None:
        if number == 0:
            assert second.wait(LIMIT)
        second.set()
        raise VllmEnvError(f"Check {number} failed.")

    with pytest.raises(VllmEnvError, match=r"Check 0 failed\."):
        together(partial(check, 0), partial(check, 1))


def test_ctrl_c_ends_the_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It reaches the main thread, which waits for a result."""
    runs = threading.Event()
    ended: list[str] = []

    def program() -> None:
        try:
            run(FOR_EVER, what="wait", on_line=lambda _: runs.set())
        except CommandError:
            ended.append("program")

    class Interrupted:
        def result(self) -> None:
            assert runs.wait(LIMIT)
            raise KeyboardInterrupt

    from concurrent.futures import ThreadPoolExecutor

    submit = ThreadPoolExecutor.submit

    def interrupted(pool: ThreadPoolExecutor, *job: object) -> object:
        submit(pool, *job)
        return Interrupted()

    monkeypatch.setattr(ThreadPoolExecutor, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        together(program)
    assert ended == ["program"]


def test_a_block_that_fails_ends_the_job_beside_it() -> None:
    """Also by Ctrl-C, which reaches the main thread."""
    runs = threading.Event()

    def program() -> None:
        run(FOR_EVER, what="wait", on_line=lambda _: runs.set())

    def interrupted() -> None:
        assert runs.wait(LIMIT)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), beside(program) as job:
        interrupted()
    assert isinstance(job.exception(0), CommandError)
