"""Show the progress of a long run in one line of the terminal."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import TextIO

    from loadtest.record import Record

# A shorter run needs no line.
QUIET_SECONDS = 1.0
# Answers may come faster than a reader can follow.
REDRAW_SECONDS = 0.2
_WIDTH = 24


@dataclass
class ProgressLine:
    """Count requests; draw only on a terminal and only after ``QUIET_SECONDS``.

    Args:
        total: number of requests; None if nobody knows it.
        seconds: time for which requests are sent, if the number is not known.
        stream: where to draw.
    """

    total: int | None
    seconds: float | None
    stream: TextIO
    _done: int = 0
    _tokens: int = 0
    _started: float = field(default_factory=time.monotonic)
    _drawn: float = 0.0  # when the line was last drawn; 0: never

    def advance(self, record: Record) -> None:
        """Note that a request has ended."""
        self._done += 1
        self._tokens += record.output_tokens or 0
        now = time.monotonic()
        elapsed = now - self._started
        if elapsed < QUIET_SECONDS or now - self._drawn < REDRAW_SECONDS:
            return
        # A log file would get a line for each drawing.
        if self.stream.isatty():
            self._drawn = now
            self.stream.write(f"\r{self._line(elapsed)}\x1b[K")
            self.stream.flush()

    def _line(self, elapsed: float) -> str:
        """Return the line as it is after ``elapsed`` seconds."""
        # Without a number of requests, the time says how far the run is. Without both, the bar is
        # full.
        share = self._done / self.total if self.total else elapsed / (self.seconds or elapsed)
        filled = min(_WIDTH, int(share * _WIDTH))
        bar = "#" * filled + "-" * (_WIDTH - filled)
        of_total = f"/{self.total}" if self.total else ""
        speed = f", {self._tokens / elapsed:,.0f} tokens/s" if self._tokens else ""
        return f"[{bar}] {self._done}{of_total} requests, {elapsed:.0f} s{speed}"

    def close(self) -> None:
        """Remove the line if one was drawn."""
        if self._drawn:
            # To the start of the line, then erase it (ECMA-48).
            self.stream.write("\r\x1b[K")
            self.stream.flush()
