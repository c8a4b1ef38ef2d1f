"""The launcher: the signals of what it becomes, and a parent that has ended; test_process.py has the rest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from vllm_env.base import launch


def _launch(*program: object, parent: int = 0) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run the launcher to its end and return what the program printed and what came through the pipe."""
    reader, writer = os.pipe()
    arguments = [parent or os.getpid(), int(signal.SIGKILL), writer, "{}", *program]
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


def test_signals_that_python_ignores_are_the_programs_own_again() -> None:
    """The launcher's interpreter ignores them, and an ignored signal outlives exec: a pipe's end would end no program."""
    done, _ = _launch("cat", "/proc/self/status")
    ignored = next(line.split()[1] for line in done.stdout.splitlines() if line.startswith("SigIgn:"))
    assert not [n.name for n in (signal.SIGPIPE, signal.SIGXFSZ) if int(ignored, 16) & 1 << n - 1]


def test_it_does_not_start_for_a_parent_that_is_gone() -> None:
    """Between its start and the request for a signal: nobody would end the program any more."""
    done, failure = _launch("echo", "started", parent=os.getpid() + 1)
    assert (done.returncode, done.stdout, failure) == (1, "", "")
