"""One line on a terminal that says how far a run is, once it lasts long enough for a user to wonder."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import TextIO

QUIET_SECONDS = 2.0
REDRAW_SECONDS = 0.2


@dataclass
class ProgressLine:
    """Counts answers; draws only on a terminal and only after ``QUIET_SECONDS``."""

    total: int
    stream: TextIO
    _done: int = 0
    _started: float = field(default_factory=time.monotonic)
    _drawn: float = 0.0

    def advance(self) -> None:
        """Note one more answer."""
        self._done += 1
        now = time.monotonic()
        if (
            now - self._started < QUIET_SECONDS
            or now - self._drawn < REDRAW_SECONDS
            or not self.stream.isatty()
        ):
            return
        self._drawn = now
        self.stream.write(f"\r{self._done}/{self.total} answers, {now - self._started:.0f} s ")
        self.stream.flush()

    def clear(self) -> None:
        """Remove the line if one was drawn."""
        if self._drawn:
            self.stream.write("\r\x1b[K")
            self.stream.flush()
