"""A line for each step that takes long, so that a person sees what goes on: with the seconds on a terminal."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def step(text: str) -> Iterator[None]:
    """Tell on stderr that `text` goes on; on a terminal count its seconds there, once a second."""
    stream, started, ended = sys.stderr, time.monotonic(), threading.Event()
    print(text, end="" if stream.isatty() else " ...\n", file=stream, flush=True)

    def count() -> None:
        while not ended.wait(1):
            print(f"\r{text} {time.monotonic() - started:.0f} s", end="", file=stream, flush=True)

    counter = threading.Thread(target=count, daemon=True)
    if stream.isatty():
        counter.start()
    try:
        yield
    finally:
        ended.set()
        if stream.isatty():
            counter.join()
            print(f"\r{text} {time.monotonic() - started:.0f} s", file=stream, flush=True)
