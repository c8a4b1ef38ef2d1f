"""client/progress_line.py: shown to a user who waits, and to nobody else."""

from __future__ import annotations

import io

import pytest

import progress_line
from progress_line import ProgressLine


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_long_run_on_a_terminal_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line counts answers, and is removed at the end."""
    monkeypatch.setattr(progress_line, "QUIET_SECONDS", 0.0)
    terminal = Terminal()
    line = ProgressLine(total=40, stream=terminal)
    line.advance()
    line.clear()
    assert terminal.getvalue().startswith("\r1/40 answers")
    assert terminal.getvalue().endswith("\r\x1b[K")


@pytest.mark.parametrize(("stream", "quiet"), [(Terminal(), 3600.0), (io.StringIO(), 0.0)])
def test_short_runs_and_files_get_no_line(stream: io.StringIO, quiet: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs and quick runs stay clean: not a byte is written."""
    monkeypatch.setattr(progress_line, "QUIET_SECONDS", quiet)
    line = ProgressLine(total=4, stream=stream)
    line.advance()
    line.clear()
    assert stream.getvalue() == ""
