"""What a person sees: one line a stage on stderr, with its progress and its time.

On a terminal the running stage is a live line of ``rich``; elsewhere a stage longer than two seconds says that it has
begun, and each one says how long it took.
"""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Iterator


class Stage:
    """A running stage; ``update`` moves its bar, ``detail`` replaces the text behind its name."""

    def __init__(self, name: str, live: Progress | None) -> None:
        self.name = name
        self.detail_text = ""
        self._live = live
        self._task = live.add_task(name, total=None, detail="") if live else None

    def update(self, fraction: float) -> None:
        """Move the bar to ``fraction`` (0 to 1)."""
        if self._live and self._task is not None:
            self._live.update(self._task, total=1.0, completed=fraction)

    def detail(self, text: str) -> None:
        """Show ``text`` behind the stage's name, and keep it for the line that remains."""
        self.detail_text = text
        if self._live and self._task is not None:
            self._live.update(self._task, detail=text)


class Console:
    """Progress and messages on stderr, results on stdout."""

    def __init__(self, *, quiet: bool = False, verbose: bool = False) -> None:
        self.quiet = quiet
        self.verbose = verbose
        self._rich = RichConsole(stderr=True, highlight=False, soft_wrap=True)

    @contextmanager
    def stage(self, name: str) -> Iterator[Stage]:
        """Show a stage while the block runs, and one line with its time when it is done."""
        started = time.monotonic()
        live = self._progress() if self._rich.is_terminal and not self.quiet else None
        stage = Stage(name, live)
        if live:
            with live:
                yield stage
        else:
            self.note(f"{name} …")
            yield stage
        seconds = time.monotonic() - started
        detail = f"  {stage.detail_text}" if stage.detail_text else ""
        self.note(f"{name:<10} {seconds:6.1f} s{detail}")

    def _progress(self) -> Progress:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[detail]}"),
        )
        return Progress(*columns, console=self._rich, transient=True)

    def note(self, text: str) -> None:
        """Print a line of progress, unless quiet."""
        if not self.quiet:
            self._rich.print(text, markup=False)

    def warn(self, text: str) -> None:
        """Print a warning, also when quiet."""
        self._rich.print(f"warning: {text}", markup=False)

    def debug(self, text: str) -> None:
        """Print a line only with ``--verbose``."""
        if self.verbose:
            self._rich.print(text, markup=False, style="dim")

    def error(self, text: str) -> None:
        """Print an error message."""
        self._rich.print(text, markup=False)

    @staticmethod
    def result(text: str) -> None:
        """Print a result on stdout."""
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
