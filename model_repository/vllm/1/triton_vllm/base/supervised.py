"""Run a thread of the adapter that survives exceptions."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from triton_vllm.base.protocols import Log

# Without a pause, an exception that is raised again at once would take a whole core.
PAUSE_S = 0.1
"""Seconds between an exception and the next attempt."""


def thread(name: str, work: Callable[[], None], log: Log) -> threading.Thread:
    """Return a thread, not yet started, that calls ``work`` until it returns.

    After an exception, ``work`` is called again, so it must be able to continue. An exception that
    is raised several times in a row is logged once.
    """

    def run() -> None:
        """Call ``work`` until it returns; log an exception and go on."""
        last_error = ""
        while True:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - the thread's other jobs must be served
                line = f"{type(error).__name__}: {error}"
                if line != last_error:
                    last_error = line
                    text = "".join(traceback.format_exception(error))
                    # The log goes through Triton's shared memory, which may be full.
                    with contextlib.suppress(Exception):
                        # Triton's log has no method `exception`.
                        log.error(f"thread {name} failed and goes on:\n{text}")  # noqa: TRY400
                time.sleep(PAUSE_S)
            else:
                return

    return threading.Thread(target=run, name=name, daemon=True)
