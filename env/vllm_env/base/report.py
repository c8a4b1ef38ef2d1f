"""The user's view: one line per stage on stderr, with progress and time; results on stdout.

A context variable holds the console. The command line sets it. A function need not get a console
as an argument only to report.

On a terminal, ``rich`` shows the running stage as a live line. Elsewhere, a stage prints that it
has begun and how long it took.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from rich.console import Console as RichConsole
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

_COLUMNS = (
    SpinnerColumn(),
    TextColumn("{task.description:<10}"),
    BarColumn(bar_width=24),
    TaskProgressColumn(),
    TimeElapsedColumn(),
    TextColumn("{task.fields[detail]}"),
)


@dataclass
class _Stage:
    """A running stage: its last step, and its row on a terminal."""

    detail: str = ""
    row: TaskID | None = None


# The stage that the caller runs in. A stage may run within another one, in a thread of its own.
_stage: ContextVar[_Stage | None] = ContextVar("stage", default=None)


class Console:
    """Progress and messages on stderr, results on stdout."""

    def __init__(self, *, quiet: bool = False, verbose: bool = False) -> None:
        self.quiet = quiet
        self.verbose = verbose
        # soft_wrap: a long line stays one line, so that a log can be searched for it.
        self._rich = RichConsole(stderr=True, highlight=False, soft_wrap=True)
        self._live: Progress | None = None

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Show a stage while the block runs; then print a line with its time and its last step."""
        started = time.monotonic()
        stage = _Stage()
        token = _stage.set(stage)
        try:
            if self._rich.is_terminal and not self.quiet:
                with self._row(name) as stage.row:
                    yield
            else:
                # A stage may take minutes, and a log without this line would look hung.
                self.note(f"{name} …")
                yield
        finally:
            _stage.reset(token)
        detail = f"  {stage.detail}" if stage.detail else ""
        self.note(f"{name:<10} {time.monotonic() - started:6.1f} s{detail}")

    @contextmanager
    def _row(self, name: str) -> Iterator[TaskID]:
        """Show a live row while the block runs. An inner stage's row is below the outer stage's."""
        if self._live:
            row = self._live.add_task(name, total=None, detail="")
            try:
                yield row
            finally:
                self._live.remove_task(row)
            return
        # The outermost stage makes the display, and ends it.
        self._live = Progress(*_COLUMNS, console=self._rich, transient=True)
        try:
            with self._live:
                yield self._live.add_task(name, total=None, detail="")
        finally:
            self._live = None

    def step(self, text: str, fraction: float | None = None) -> None:
        """Show the current step of the caller's stage, and its progress from 0 to 1."""
        stage = _stage.get()
        if stage is None:
            return
        stage.detail = text
        if self._live and stage.row is not None:
            self._live.update(stage.row, detail=text)
            if fraction is not None:
                self._live.update(stage.row, total=1.0, completed=fraction)

    def note(self, text: str) -> None:
        """Print a line of progress, unless quiet."""
        # markup=False: rich would take the [cpu] of a requirement for a style.
        if not self.quiet:
            self._rich.print(text, markup=False)

    def debug(self, text: str) -> None:
        """Print a line, but only with ``--verbose``."""
        if self.verbose:
            self._rich.print(text, markup=False, style="dim")

    def error(self, text: str) -> None:
        """Print an error message."""
        self._rich.print(text, markup=False)

    @staticmethod
    def result(text: str) -> None:
        """Print a result on stdout."""
        print(text, flush=True)  # noqa: T201 - the one place that prints


# A new thread starts with this default, which ignores --quiet. A thread that reports must run in
# contextvars.copy_context().
_console: ContextVar[Console] = ContextVar("console", default=Console())  # noqa: B039


@contextmanager
def reporting_to(console: Console) -> Iterator[None]:
    """Send the reports of the functions below to a console while the block runs."""
    # Restored afterwards, because the tests run the command line many times in one process.
    token = _console.set(console)
    try:
        yield
    finally:
        _console.reset(token)


def stage(name: str) -> AbstractContextManager[None]:
    """Show a stage while the block runs; see :meth:`Console.stage`."""
    return _console.get().stage(name)


def step(text: str, fraction: float | None = None) -> None:
    """Show the current step of the running stage, and its progress from 0 to 1."""
    _console.get().step(text, fraction)


def note(text: str) -> None:
    """Print a line of progress, unless quiet."""
    _console.get().note(text)


def debug(text: str) -> None:
    """Print a line, but only with ``--verbose``."""
    _console.get().debug(text)
