"""The boundary to other programs: output, failures, and that nothing outlives the packager."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.patience import LIMIT, wait_for
from vllm_env.base.errors import CommandError
from vllm_env.base.process import capture, run

_ENV = Path(__file__).resolve().parents[4] / "env"


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_failure_names_purpose_program_status_and_last_lines() -> None:
    """The error says what was wanted, and keeps what the program said."""
    with pytest.raises(CommandError) as caught:
        run(["sh", "-c", "seq 100; exit 7"], what="count", remedy="Count less.")
    error = caught.value
    assert error.what == "Could not count: sh ended with status 7."
    assert error.tail.splitlines()[-1] == "100"
    assert len(error.tail.splitlines()) == 40
    assert error.remedy == "Count less."


def test_a_missing_program_is_no_traceback() -> None:
    """A program that is not installed is named."""
    with pytest.raises(CommandError, match="/nonexistent/program does not start"):
        run(["/nonexistent/program"], what="x", remedy="Install it.")


def test_a_full_file_system_is_the_named_cause() -> None:
    """A program that found no space left: the remedy is about space, whatever the caller's would be."""
    with pytest.raises(CommandError) as caught:
        run(["sh", "-c", "echo 'write: No space left on device'; exit 1"], what="x", remedy="Check the network.")
    assert "full" in caught.value.cause
    assert "space" in caught.value.remedy


def test_empty_values_remove_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty text is not the same as an unset variable to pip or Python."""
    monkeypatch.setenv("SOME_VARIABLE", "1")
    shown = run(["env"], what="x", env={"SOME_VARIABLE": "", "OTHER": "2"})
    assert "SOME_VARIABLE" not in shown
    assert "OTHER=2" in shown.splitlines()


# As the command does; with Python's own handler, a Ctrl-C would also hit the start and the clean-up.
_RUNS = """
import sys
from vllm_env.base.interrupts import take_interrupts
from vllm_env.base.process import run
take_interrupts()
run(["sh", "-c", "sleep 600 & echo $! > $0.child; echo $$ > $0.shell; wait", sys.argv[1]], what="x")
"""


def _start(tmp_path: Path, before: str = "") -> tuple[subprocess.Popen[bytes], int, int]:
    packager = subprocess.Popen(
        [sys.executable, "-c", before + _RUNS, str(tmp_path / "pid")],
        env={**os.environ, "PYTHONPATH": str(_ENV)},
        stderr=subprocess.DEVNULL,
    )
    shell = tmp_path / "pid.shell"
    wait_for(lambda: shell.exists() and shell.read_text().strip(), "the start of the shell")
    return packager, int(shell.read_text()), int((tmp_path / "pid.child").read_text())


# The program has begun, and ``start`` returns only after the Ctrl-C.
_SLOW_START = """
import time
from vllm_env.base import interrupts, process
start = process.start
def slow(*args, **options):
    child = start(*args, **options)
    until = time.monotonic() + 300
    while not interrupts._State.is_waiting and time.monotonic() < until:
        time.sleep(0.01)
    return child
process.start = slow
"""


@pytest.mark.parametrize("before", ["", _SLOW_START], ids=["running", "starting"])
def test_ctrl_c_ends_the_program_and_all_that_it_started(tmp_path: Path, before: str) -> None:
    """SIGINT to the packager alone: the program's whole session goes, grandchildren included."""
    packager, shell, child = _start(tmp_path, before)
    packager.send_signal(signal.SIGINT)
    assert packager.wait(LIMIT) != 0
    wait_for(lambda: not _alive(shell) and not _alive(child), "the end of the shell and its child")


def test_the_program_dies_with_a_packager_that_is_killed(tmp_path: Path) -> None:
    """SIGKILL leaves the packager no chance to clean up: the kernel ends the program."""
    packager, shell, child = _start(tmp_path)
    packager.kill()
    packager.wait()
    wait_for(lambda: not _alive(shell), "the end of the shell")
    if _alive(child):  # only the program itself is tied to the packager; what a shell forked is the shell's
        os.kill(child, signal.SIGKILL)


def test_a_short_program_may_fail_or_hang(tmp_path: Path) -> None:
    """Its status is no error; that it does not start, or does not end in time, is."""
    assert capture(["sh", "-c", "echo a; echo b >&2; exit 3"]) == (3, "a\nb\n")
    with pytest.raises(CommandError, match="does not start"):
        capture([tmp_path / "none"])
    with pytest.raises(CommandError, match="has not answered for 0 s"):
        capture(["sleep", "600"], seconds=0.2)
