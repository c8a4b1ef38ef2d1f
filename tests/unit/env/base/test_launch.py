"""The launcher: what it becomes, with which variables and signals, and how it ends with the process that started it."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.patience import LIMIT, wait_for
from vllm_env.base import launch

if TYPE_CHECKING:
    from collections.abc import Mapping

_ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))"
_HANDLES = "import os; print(*(os.readlink(f'/proc/self/fd/{n}') for n in range(3, 64) if os.path.exists(f'/proc/self/fd/{n}')))"
# starts the launcher with the wanted signal, tells the program's id, and then ends when its input does
_PARENT = """
import os, subprocess, sys
launcher, number, code = sys.argv[1:]
reader, writer = os.pipe()
command = [sys.executable, "-I", "-S", launcher, str(os.getpid()), number, str(writer), "{}", sys.executable, "-c", code]
child = subprocess.Popen(command, pass_fds=(writer,), stdout=sys.stdout)
os.close(writer)
os.read(reader, 1)
print(child.pid, flush=True)
sys.stdin.read()
os.kill(os.getpid(), 9)
"""


def _launch(
    *program: object, parent: int = 0, changes: Mapping[str, str | None] | None = None
) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run the launcher to its end and return what the program printed and what came through the pipe."""
    reader, writer = os.pipe()
    arguments = [parent or os.getpid(), int(signal.SIGKILL), writer, json.dumps(changes or {}), *program]
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", launch.__file__, *map(str, arguments)],
            pass_fds=(writer,),
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
    finally:
        os.close(writer)
    with os.fdopen(reader) as pipe:
        return done, pipe.read()


def test_it_becomes_the_program() -> None:
    """Its arguments, its output, its status; nothing comes through the pipe."""
    done, failure = _launch("sh", "-c", 'echo "$1"; exit 7', "sh", "two words")
    assert (done.returncode, done.stdout, done.stderr, failure) == (7, "two words\n", "", "")


def test_variables_are_set_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the changes; null removes one, also one that is not set, and all others are inherited."""
    monkeypatch.setenv("KEPT", "kept")
    monkeypatch.setenv("REMOVED", "there")
    done, _ = _launch(sys.executable, "-c", _ENVIRONMENT, changes={"SET": "a=b", "REMOVED": None, "UNKNOWN": None})
    shown = json.loads(done.stdout)
    assert (shown["KEPT"], shown["SET"]) == ("kept", "a=b")
    assert not {"REMOVED", "UNKNOWN"} & shown.keys()


def test_the_program_is_found_by_the_new_path(tmp_path: Path) -> None:
    """PATH counts as it is for the program, not as the packager has it."""
    (tmp_path / "only-here").write_text("#!/bin/sh\necho found\n")
    (tmp_path / "only-here").chmod(0o755)
    done, failure = _launch("only-here", changes={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert (done.stdout, failure) == ("found\n", "")


def test_signals_that_python_ignores_are_the_programs_own_again() -> None:
    """The launcher's interpreter ignores them, and an ignored signal outlives exec: a pipe's end would end no program."""
    done, _ = _launch("cat", "/proc/self/status")
    ignored = next(line.split()[1] for line in done.stdout.splitlines() if line.startswith("SigIgn:"))
    assert not [n.name for n in (signal.SIGPIPE, signal.SIGXFSZ) if int(ignored, 16) & 1 << n - 1]


@pytest.mark.parametrize(
    ("program", "code"), [("/nonexistent/program", errno.ENOENT), ("/etc/passwd", errno.EACCES), ("/", errno.EACCES)]
)
def test_a_program_that_does_not_start_gives_its_error_number(program: str, code: int) -> None:
    """Through the pipe, so that the packager can say why; no traceback."""
    done, failure = _launch(program)
    assert (int(failure), done.returncode, done.stdout, done.stderr) == (code, 1, "", "")


def test_the_pipe_is_not_the_programs() -> None:
    """The packager waits for its end, which must come when the program starts and not when it is done."""
    done, _ = _launch(sys.executable, "-I", "-c", _HANDLES)
    assert "pipe:" not in done.stdout


def test_it_does_not_start_for_a_parent_that_is_gone() -> None:
    """Between its start and the request for a signal: nobody would end the program any more."""
    done, failure = _launch("echo", "started", parent=os.getpid() + 1)
    assert (done.returncode, done.stdout, failure) == (1, "", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_program_gets_its_signal_when_the_parent_is_killed(tmp_path: Path, number: signal.Signals) -> None:
    """SIGKILL leaves the parent nothing to do: the kernel sends the signal that was asked for."""
    code = (
        "import pathlib, signal, sys, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path({str(tmp_path / 'told')!r}).touch(), sys.exit()))\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, launch.__file__, str(int(number)), code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdin
    assert parent.stdout
    said = {parent.stdout.readline().strip(), parent.stdout.readline().strip()}
    child = Path("/proc") / next(line for line in said if line.isdigit())
    assert "ready" in said
    assert child.exists()
    parent.stdin.close()
    assert parent.wait(LIMIT) == -signal.SIGKILL
    wait_for(lambda: not _runs(child), "the end of the program")
    parent.stdout.close()
    assert (tmp_path / "told").exists() is (number is signal.SIGTERM)


def _runs(process: Path) -> bool:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
