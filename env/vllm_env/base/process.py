"""The one place that runs other programs.

Each program gets a session of its own, so that an interrupted build can end it together with everything that it
started, and dies with the packager even when that is killed with SIGKILL (see ``launch.py``).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from typing import IO, TYPE_CHECKING

from .errors import SPACE_REMEDY, CommandError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_TAIL_LINES = 40
_LAUNCHER = Path(__file__).with_name("launch.py")


def run(
    argv: Sequence[object],
    *,
    what: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    log: Path | None = None,
    on_line: Callable[[str], None] | None = None,
    remedy: str = "",
) -> str:
    """Run a program and return what it printed (stdout and stderr together).

    Args:
        argv: the program and its arguments, texts and paths.
        what: what the program does for us, for the error message ("resolve the requirements").
        env: variables to add to this process's own; an empty value removes one.
        cwd: the folder to run in.
        log: a file that receives the output as well.
        on_line: called with each line as it is printed.
        remedy: the next step to name when it fails.

    Raises:
        CommandError: the program is missing or ended with a non-zero status.
    """
    arguments = [str(a) for a in argv]
    try:
        child = start(arguments, env=env, cwd=cwd, stdout=subprocess.PIPE)
    except OSError as error:
        raise CommandError(
            f"Could not {what}: {arguments[0]} does not start ({error.strerror}).", remedy=remedy
        ) from error
    with _ended_with_its_session(child):
        output = _read(child, log, on_line)
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


def start(
    argv: Sequence[str],
    *,
    stdout: int | IO[bytes],
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    when_parent_ends: signal.Signals = signal.SIGKILL,
) -> subprocess.Popen[str]:
    """Start a program in a session of its own and return at once.

    It ends with the thread that has started it, as the kernel counts parents.

    Args:
        argv: the program and its arguments.
        stdout: where its stdout and stderr go; ``subprocess.PIPE`` gives UTF-8 text.
        env: variables to add to this process's own; an empty value removes one.
        cwd: the folder to run in.
        when_parent_ends: the signal that it gets when this process ends.

    Raises:
        OSError: the program is missing or is none.
    """
    changes = json.dumps({name: value or None for name, value in (env or {}).items()})
    reader, writer = os.pipe()
    launcher = [sys.executable, "-I", "-S", os.fspath(_LAUNCHER)]
    try:
        child = subprocess.Popen(
            [*launcher, str(os.getpid()), str(int(when_parent_ends)), str(writer), changes, *argv],
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
            pass_fds=(writer,),
        )
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    try:
        with open(reader, "rb") as pipe:
            failure = pipe.read()  # ends when the launcher has become the program
    except BaseException:
        end_session(child)
        raise
    if failure:
        child.communicate()
        raise OSError(int(failure), os.strerror(int(failure)))
    return child


def _read(child: subprocess.Popen[str], log: Path | None, on_line: Callable[[str], None] | None) -> str:
    lines: deque[str] = deque(maxlen=100_000)
    with log.open("a", encoding="utf-8") if log else contextlib.nullcontext() as sink:
        for line in child.stdout or ():
            lines.append(line)
            if sink:
                sink.write(line)
            if on_line:
                on_line(line.rstrip("\n"))
    child.wait()
    return "".join(lines)


class _ended_with_its_session:  # noqa: N801 - reads as the clause that it is
    """Ends the program and its session when the block is left by an exception."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self._child = child

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            end_session(self._child)
        if self._child.stdout:
            self._child.stdout.close()


def end_session(child: subprocess.Popen[str], grace: float = 3.0) -> None:
    """End a program that :func:`run` started and everything in its session: SIGTERM, then SIGKILL after ``grace`` s."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    reaper = threading.Timer(grace, _kill_group, (child.pid,))
    reaper.start()
    child.wait()
    reaper.cancel()
    _kill_group(child.pid)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
