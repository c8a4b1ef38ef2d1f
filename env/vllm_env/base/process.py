"""The only place that runs other programs.

Each program gets a session of its own: an interrupted build ends the program with everything that
it started. The program also ends with the packager, even if SIGKILL ends that (``launch.py``).
"""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any, NoReturn

from .errors import SPACE_REMEDY, CommandError
from .interrupts import interrupts_held

Child = subprocess.Popen[str]
"""A program that :func:`start` started."""
# A program's output may have bytes that are not UTF-8. They must not end a build.
_QUIETLY: Any = {
    "stdin": subprocess.DEVNULL,
    "stderr": subprocess.STDOUT,
    "text": True,
    "errors": "replace",
}
_TAIL_LINES = 40
_LAUNCHER = Path(__file__).with_name("launch.py")


class _Group:
    """The programs that several threads run; all of them can be ended at once.

    Args:
        outer: the group whose end is also the end of this one.
    """

    def __init__(self, outer: "_Group | None" = None) -> None:
        self._outer = outer
        self._lock = threading.Lock()
        self._children: set[Child] = set()
        self._has_ended = False

    @contextlib.contextmanager
    def holding(self, child: Child) -> Iterator[None]:
        """Count a program to the group while the block runs: it ends when the group is ended."""
        with self._lock:
            self._children.add(child)
            has_ended = self._has_ended
        try:
            # A thread may start its next program after the others have been ended.
            if has_ended:
                end_session(child)
            with self._outer.holding(child) if self._outer else contextlib.nullcontext():
                yield
        finally:
            with self._lock:
                self._children.discard(child)

    def end(self) -> None:
        """End all programs, and each further one as soon as it has started."""
        with self._lock:
            self._has_ended = True
            children = list(self._children)
        _end_sessions(children)


_group: ContextVar[_Group | None] = ContextVar("group", default=None)


@contextlib.contextmanager
def ended_together() -> Iterator[None]:
    """If the block fails, end all programs that :func:`run` and :func:`grouped` hold in it.

    Those of other threads are ended, too, if they run with this context. Otherwise a Ctrl-C would
    reach the main thread only, and a thread that waits for a program would go on.
    """
    group = _Group(_group.get())
    token = _group.set(group)
    try:
        yield
    except BaseException:
        group.end()
        raise
    finally:
        _group.reset(token)


def grouped(child: Child) -> contextlib.AbstractContextManager[None]:
    """Count a program to the group of :func:`ended_together`, if any, while the block runs."""
    return (_group.get() or _Group()).holding(child)


def run(  # noqa: PLR0913 - the argv, and options that most callers leave out
    argv: Sequence[object],
    *,
    what: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    on_line: Callable[[str], None] | None = None,
    pass_fds: Sequence[int] = (),
    remedy: str = "",
) -> str:
    """Run a program and return what it printed on stdout and stderr.

    Args:
        argv: program and arguments.
        what: purpose of the program for the error message, such as "resolve the requirements".
        env: added to this process's variables; an empty value removes a variable.
        cwd: working folder.
        on_line: called with each line as it is printed.
        pass_fds: descriptors that the program inherits.
        remedy: next step for the error message.

    Raises:
        CommandError: the program is missing or fails.
    """
    # From before the child starts until it has ended: at no moment may a Ctrl-C leave it running.
    with interrupts_held() as let_through:
        try:
            child = start(argv, env=env, cwd=cwd, stdout=subprocess.PIPE, pass_fds=pass_fds)
        except OSError as error:
            raise CommandError(
                f"Could not {what}: {argv[0]} does not start ({error.strerror}).", remedy=remedy
            ) from error
        # ``with child`` closes the pipe of the output.
        with child, grouped(child):
            try:
                with let_through():
                    output = _read(child, on_line)
            except BaseException:
                end_session(child)
                raise
    if child.returncode != 0:
        tail = "\n".join(output.splitlines()[-_TAIL_LINES:])
        cause = ""
        # A full file system shows in the text alone, which is the C library's.
        if os.strerror(errno.ENOSPC) in tail:
            cause = "A file system is full."
            remedy = SPACE_REMEDY
        raise CommandError(
            f"Could not {what}: {Path(str(argv[0])).name} ended with status {child.returncode}.",
            tail=tail,
            cause=cause,
            remedy=remedy or "The last lines that it printed are above.",
        )
    return output


def become(argv: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Replace this process by a program.

    Raises:
        CommandError: the program does not start.
    """
    sys.stdout.flush()
    try:
        os.execve(argv[0], list(argv), environment)  # noqa: S606 - no shell is wanted
    except OSError as error:
        raise CommandError(f"{argv[0]} does not start: {error.strerror}.") from error


def capture(argv: Sequence[object], *, seconds: float | None = None) -> tuple[int, str]:
    """Run a short program that may fail, and return its status and output.

    Args:
        argv: program and arguments.
        seconds: the longest time it may take; None for any time.

    Raises:
        CommandError: the program does not start, or does not end in time.
    """
    program = str(argv[0])
    try:
        child = subprocess.Popen([str(a) for a in argv], stdout=subprocess.PIPE, **_QUIETLY)
    except OSError as error:
        raise CommandError(f"{program} does not start: {error.strerror}.") from error
    try:
        output, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as error:
        child.kill()
        # SIGKILL does not end a program that hangs in a driver. It is left behind.
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(1)
        raise CommandError(f"{program} has not answered for {seconds:.0f} s.") from error
    return child.returncode, output


def start(
    argv: Sequence[object],
    *,
    stdout: int | IO[bytes],
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    pass_fds: Sequence[int] = (),
    when_parent_ends: signal.Signals = signal.SIGKILL,
) -> Child:
    """Start a program in a session of its own. It gets a signal when the calling thread ends.

    Call this while interrupts are held: until the caller has the child, no code would end it.

    Args:
        argv: program and arguments.
        stdout: receives stderr as well; ``subprocess.PIPE`` gives UTF-8 text.
        env: added to this process's variables; an empty value removes a variable.
        cwd: working folder.
        pass_fds: descriptors that the program inherits.
        when_parent_ends: the signal that the program gets when the calling thread ends, and so
            when this process ends (``launch.py``).

    Raises:
        OSError: the program cannot be started.
    """
    reader, writer = os.pipe()
    # null removes a variable. pip and Python would not take an empty one for an unset one.
    changes = json.dumps({name: value or None for name, value in (env or {}).items()})
    # -I: the current folder may have a module json. -S: the launcher needs no installed package.
    launcher = [sys.executable, "-I", "-S", _LAUNCHER]
    command = [*launcher, os.getpid(), int(when_parent_ends), writer, changes, *argv]
    with open(reader, "rb") as pipe:
        try:
            child = subprocess.Popen(
                [str(part) for part in command],
                stdout=stdout,
                cwd=cwd,
                start_new_session=True,
                pass_fds=[writer, *pass_fds],
                encoding="utf-8",
                **_QUIETLY,
            )
        finally:
            os.close(writer)
        # This read ends when exec replaces the launcher, because exec closes the pipe.
        failure = pipe.read()
    if failure:
        child.communicate()
        raise OSError(int(failure), os.strerror(int(failure)))
    return child


def _read(child: Child, on_line: Callable[[str], None] | None) -> str:
    """Read the output of a program until it ends; return at most its last 100,000 lines."""
    # The limit bounds the memory for a program that prints a lot.
    lines: deque[str] = deque(maxlen=100_000)
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


def end_session(child: Child) -> None:
    """End a program of :func:`run` and its whole session."""
    _end_sessions([child])


def _end_sessions(children: Sequence[Child]) -> None:
    """End programs with all that they have started: SIGTERM, and after 3 s SIGKILL."""
    for child in children:
        _signal_session(child, signal.SIGTERM)
    for child in children:
        # Programs such as git clean up on SIGTERM, all at the same time.
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=3)
        # Also if it has ended: what it has started may still run. As long as one of them does, no
        # other group can have this id.
        _signal_session(child, signal.SIGKILL)
        child.wait()


def _signal_session(child: Child, number: signal.Signals) -> None:
    # start() made the child the leader of its session, so its id is the id of the group.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)
