"""Show the progress of a long run in one line of the terminal."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import TextIO

# A shorter run needs no line.
QUIET_SECONDS = 2.0
# Answers may come faster than a reader can follow.
REDRAW_SECONDS = 0.2


@dataclass
class ProgressLine:
    """Count answers; draw only on a terminal and only after ``QUIET_SECONDS``.

    Args:
        total: number of prompts.
        stream: where to draw.
    """

    total: int
    stream: TextIO
    _done: int = 0
    _started: float = field(default_factory=time.monotonic)
    _drawn: float = 0.0

    def advance(self) -> None:
        """Note one more answer."""
        self._done += 1
        now = time.monotonic()
        elapsed = now - self._started
        if elapsed < QUIET_SECONDS or now - self._drawn < REDRAW_SECONDS:
            return
        # A log file would get a line for each drawing.
        if self.stream.isatty():
            self._drawn = now
            self.stream.write(f"\r{self._done}/{self.total} answers, {elapsed:.0f} s ")
            self.stream.flush()

    def clear(self) -> None:
        """Remove the line if one was drawn."""
        if self._drawn:
            # To the start of the line, then erase it (ECMA-48).
            self.stream.write("\r\x1b[K")
            self.stream.flush()
