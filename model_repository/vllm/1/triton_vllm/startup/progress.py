"""Log what a load is doing."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triton_vllm.base.protocols import Log

# Loads took 21 to 118 s where they were measured. Without these lines, a long one looks hung.
PERIOD_S = 15.0


class Progress:
    """Log each phase of a load, and log the current one again every 15 s; a context manager.

    Args:
        log: takes the lines.
        period_s: seconds before the current phase is logged again.
    """

    def __init__(self, log: Log, period_s: float = PERIOD_S) -> None:
        self._log = log
        self._period_s = period_s
        self._phase = "starting"
        self._began = time.monotonic()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="triton-progress", daemon=True)

    def __enter__(self) -> Progress:  # noqa: PYI034 - Self is not in the typing of Python 3.10
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Also after a failure: the thread would otherwise repeat the phase for ever.
        self._end.set()
        self._thread.join()

    def phase(self, text: str) -> None:
        """Log the phase that begins now."""
        self._phase = text
        self._log.info(text)

    def seconds(self) -> float:
        """Return how long the load has taken so far."""
        return time.monotonic() - self._began

    def _run(self) -> None:
        while not self._end.wait(self._period_s):
            self._log.info(f"still {self._phase} ({self.seconds():.0f} s since the load began)")
