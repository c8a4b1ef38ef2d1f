"""loadtest.progress: shown to a user who waits, and to nobody else."""

from __future__ import annotations

import io

import pytest

from loadtest import progress
from loadtest.progress import ProgressLine
from loadtest.record import Record, Request


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


RECORD = Record(Request(0, "", {}, stream=True), due=0.0, sent=0.0, output_tokens=5)


@pytest.mark.parametrize(("total", "shown"), [(4, "\r[######------------------] 1/4 requests"), (None, "\r[--")])
def test_long_run_on_a_terminal_shows_how_far_it_is(total: int | None, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line has a bar and counts requests and tokens, and is removed at the end; without a number, the time fills the bar."""
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    terminal = Terminal()
    line = ProgressLine(total=total, seconds=3600.0, stream=terminal)
    line.advance(RECORD)
    line.close()
    assert terminal.getvalue().startswith(shown)
    assert "tokens/s" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")
