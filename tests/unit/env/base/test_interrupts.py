"""A signal in the very moment in which a program is started, or a staging folder made or removed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from vllm_env.base import process
from vllm_env.base.interrupts import interrupts_held, take_interrupts
from vllm_env.base.locks import locked_folder
from vllm_env.base.process import run

if TYPE_CHECKING:
    from collections.abc import Iterator

MOMENTS = {
    "forked": ("c_return", "fork_exec"),
    "started": ("return", process.start.__code__),
    "read": ("call", process._read.__code__),
    "to be ended": ("call", process.end_session.__code__),
}


@contextlib.contextmanager
def interrupted_at(event: str, what: object) -> Iterator[list[str]]:
    """SIGINT at the first ``event`` of sys.setprofile() in a function, C's by name; yield a list that tells when it came."""
    came: list[str] = []

    def look(frame: Any, happened: str, argument: Any) -> None:
        name = argument.__name__ if happened.startswith("c_") else frame.f_code
        if happened == event and name == what and not came:
            came.append(event)
            os.kill(os.getpid(), signal.SIGINT)

    sys.setprofile(look)
    try:
        yield came
    finally:
        sys.setprofile(None)


def children() -> set[int]:
    """The living children of this process."""
    found = Path(f"/proc/self/task/{threading.main_thread().native_id}/children").read_text().split()
    return {pid for pid in map(int, found) if "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()}


@pytest.fixture(autouse=True)
def _as_the_command_line() -> Iterator[None]:
    """Its handlers, and a thread besides, as gRPC has some, that would take a signal which the main thread blocks."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    end = threading.Event()
    threading.Thread(target=end.wait).start()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    take_interrupts()
    yield
    end.set()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("moment", list(MOMENTS)[:3])
def test_a_program_that_has_just_been_started_is_ended(moment: str) -> None:
    """There is no moment in which it runs and nobody would end it."""
    before = children()
    with pytest.raises(KeyboardInterrupt), interrupted_at(*MOMENTS[moment]) as came:
        run(["sleep", "600"], what="sleep")
    left = children() - before
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert came
    assert not left


def test_a_second_interrupt_waits_until_the_program_is_ended() -> None:
    """An impatient user's second Ctrl-C hits the code that ends the program."""
    before = children()
    with pytest.raises(KeyboardInterrupt), interrupted_at(*MOMENTS["to be ended"]) as came:
        run(["sh", "-c", "echo; exec sleep 600"], what="sleep", on_line=lambda _: os.kill(os.getpid(), signal.SIGINT))
    left = children() - before
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert came
    assert not left


@pytest.mark.parametrize(
    ("event", "what"),
    [
        ("c_return", "mkdir"),
        ("return", tempfile.mkdtemp.__code__),
        ("c_return", "flock"),
        ("call", cast("Any", shutil.rmtree).__code__),
        ("c_return", "unlink"),
    ],
)
def test_a_staging_folder_goes(tmp_path: Path, event: str, what: object) -> None:
    """Whether it has just been made or is being removed."""
    with pytest.raises(KeyboardInterrupt), interrupted_at(event, what) as came, locked_folder(tmp_path, "staging-") as folder:  # noqa: PT012 - the block is the case
        for name in ("a", "b"):
            (folder / name).write_text(name)
    assert came
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_is_late_and_not_lost() -> None:
    """It comes when the block ends, or where it is let through."""
    seen = []
    with pytest.raises(KeyboardInterrupt), interrupts_held():  # noqa: PT012
        os.kill(os.getpid(), signal.SIGINT)
        seen.append("held")
    with pytest.raises(KeyboardInterrupt), interrupts_held() as let_through:  # noqa: PT012
        os.kill(os.getpid(), signal.SIGINT)
        seen.append("held again")
        with let_through():
            seen.append("not reached")
    with pytest.raises(KeyboardInterrupt), interrupts_held(), interrupts_held() as let_through, let_through():  # noqa: PT012
        os.kill(os.getpid(), signal.SIGINT)
        seen.append("held by the outer block")
    assert seen == ["held", "held again", "held by the outer block"]


def test_one_more_interrupt_waits_for_nothing() -> None:
    """What the first one waits for may never end; afterwards all is as before."""
    seen = []
    with pytest.raises(KeyboardInterrupt), interrupts_held():  # noqa: PT012
        os.kill(os.getpid(), signal.SIGINT)
        seen.append("held")
        os.kill(os.getpid(), signal.SIGINT)
        seen.append("not reached")
    with pytest.raises(KeyboardInterrupt), interrupts_held():  # noqa: PT012
        os.kill(os.getpid(), signal.SIGINT)
        seen.append("held again")
    assert seen == ["held", "held again"]


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    """So a shell starts what it puts into the background, and nohup(1) does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    take_interrupts()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
