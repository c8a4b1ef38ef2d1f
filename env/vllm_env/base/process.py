"""The only place that runs other programs.

Each program gets a session of its own: an interrupted build ends the program with everything that it started. The program
also dies with the packager, even if SIGKILL ends the packager (see ``launch.py``).
"""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from .errors import SPACE_REMEDY, CommandError
from .interrupts import interrupts_held

Child = subprocess.Popen[str]
"""A program that :func:`start` started."""
_QUIETLY: Any = {
    "stdin": subprocess.DEVNULL,
    "stderr": subprocess.STDOUT,
    "text": True,
    "errors": "replace",
}
_TAIL_LINES = 40
_LAUNCHER = Path(__file__).with_name("launch.py")


def run(
    argv: Sequence[object],
    *,
    what: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    on_line: Callable[[str], None] | None = None,
    remedy: str = "",
) -> str:
    """Run a program and return what it printed on stdout and stderr.

    Args:
        argv: program and arguments.
        what: purpose of the program for the error message, such as "resolve the requirements".
        env: added to this process's variables; an empty value removes a variable.
        cwd: working folder.
        on_line: called with each line as it is printed.
        remedy: next step for the error message.

    Raises:
        CommandError: the program is missing or fails.
    """
    arguments = [str(a) for a in argv]
    with (
        interrupts_held() as let_through
    ):  # held from before the child starts until it has been ended
        try:
            child = start(arguments, env=env, cwd=cwd, stdout=subprocess.PIPE)
        except OSError as error:
            raise CommandError(
                f"Could not {what}: {arguments[0]} does not start ({error.strerror}).",
                remedy=remedy,
            ) from error
        try:
            with let_through():
                output = _read(child, on_line)
        except BaseException:
            end_session(child)
            raise
        finally:
            if child.stdout:
                child.stdout.close()
    if child.returncode != 0:
        tail = "\n".join(output.splitlines()[-_TAIL_LINES:])
        full = os.strerror(errno.ENOSPC) in tail
        raise CommandError(
            f"Could not {what}: {os.path.basename(arguments[0])} ended with status {child.returncode}.",  # noqa: PTH119
            tail=tail,
            cause="A file system is full." if full else "",
            remedy=SPACE_REMEDY if full else remedy or "The last lines that it printed are above.",
        )
    return output


def capture(
    argv: Sequence[object], *, env: Mapping[str, str] | None = None, seconds: float | None = None
) -> tuple[int, str]:
    """Run a short program that may fail, and return its status and output.

    Args:
        argv: program and arguments.
        env: all variables of the program; None passes this process's own.
        seconds: the longest time it may take. A program that hangs in a driver cannot be killed; it is left behind.

    Raises:
        CommandError: the program does not start, or does not end in time.
    """
    program = str(argv[0])
    try:
        child = subprocess.Popen(
            [str(a) for a in argv], env=env, stdout=subprocess.PIPE, **_QUIETLY
        )
    except OSError as error:
        raise CommandError(f"{program} does not start: {error.strerror}.") from error
    try:
        output, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as error:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(1)
        raise CommandError(f"{program} has not answered for {seconds:.0f} s.") from error
    return child.returncode, output


def start(
    argv: Sequence[str],
    *,
    stdout: int | IO[bytes],
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    when_parent_ends: signal.Signals = signal.SIGKILL,
) -> Child:
    """Start a program in a session of its own. It ends with the thread that started it.

    Call this while interrupts are held: until the caller has the child, no code would end it.

    Args:
        argv: program and arguments.
        stdout: receives stderr as well; ``subprocess.PIPE`` gives UTF-8 text.
        env: added to this process's variables; an empty value removes a variable.
        cwd: working folder.
        when_parent_ends: the signal that the program gets when this process ends.

    Raises:
        OSError: the program cannot be started.
    """
    reader, writer = os.pipe()
    changes = json.dumps({name: value or None for name, value in (env or {}).items()})
    head = [
        sys.executable,
        "-I",
        "-S",
        _LAUNCHER,
        os.getpid(),
        int(when_parent_ends),
        writer,
        changes,
    ]
    options: Any = {
        "cwd": cwd,
        "start_new_session": True,
        "pass_fds": (writer,),
        "encoding": "utf-8",
        **_QUIETLY,
    }
    with open(reader, "rb") as pipe:
        try:
            child = subprocess.Popen(
                [str(part) for part in (*head, *argv)], stdout=stdout, **options
            )
        finally:
            os.close(writer)
        failure = pipe.read()  # ends when exec replaces the launcher: the pipe is then closed
    if failure:
        child.communicate()
        raise OSError(int(failure), os.strerror(int(failure)))
    return child


def _read(child: Child, on_line: Callable[[str], None] | None) -> str:
    """Read the output of a program until it ends."""
    lines: deque[str] = deque(
        maxlen=100_000
    )  # lines; bounds the memory for a program that prints a lot
    for line in child.stdout or ():
        lines.append(line)
        if on_line:
            on_line(line.rstrip("\n"))
    child.wait()
    return "".join(lines)


def has_ended(child: Child, seconds: float) -> bool:
    """Wait at most ``seconds`` for a program and return whether it has ended."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=seconds)
    return child.returncode is not None


def end_session(child: Child, grace: float = 3.0) -> None:
    """End a program of :func:`run` and its whole session: SIGTERM, then SIGKILL after ``grace`` seconds."""
    _signal_session(child, signal.SIGTERM)
    has_ended(child, grace)
    _signal_session(child, signal.SIGKILL)
    child.wait()


def _signal_session(child: Child, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)
