"""Wait for what must come, however slow the machine is; no other file of the tests sleeps."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_env.serve.server import TritonServer

    Found = TypeVar("Found")

LIMIT = 300.0  # s until what must come is given up; it ends a broken test and is no measure of anything
_FIRST = 0.001  # s between the first looks


def wait_for(
    condition: Callable[..., Found],
    what: str | Callable[[], str] = "what must come",
    *,
    limit: float = LIMIT,
    longest_pause: float = 0.1,
) -> Found:
    """Return what the condition returns, once that is true.

    The first looks follow each other quickly, later ones are ``longest_pause`` seconds apart.

    Raises:
        AssertionError: It is not true within ``limit`` seconds; the error says ``what``.
    """
    until = time.monotonic() + limit
    interval = min(_FIRST, longest_pause)
    late = False
    while not (found := condition()):
        assert not late, f"waited in vain for {what() if callable(what) else what}"
        time.sleep(interval)
        interval = min(2 * interval, longest_pause)
        late = time.monotonic() > until  # there is one more look: the machine may have stood still since the last one
    return found


def wait_for_line(server: TritonServer, text: str) -> None:
    """Return once the server's log has the text.

    Triton writes what a Python model logs in a thread of its own, so an answer may be there before the line that explains it.
    """
    wait_for(lambda: text in server.log.read_text(errors="replace").replace('\\"', '"'), f"{text!r} in the server's log")


def pause(seconds: float) -> None:
    """Let time pass, where the passing time is the stimulus.

    Use it to choose the moment of an interrupt or a cancellation, to space what a test produces, and between two readings of
    a figure that must stand still. Also use it before a look that finds that nothing has happened: a slow machine makes such
    a test weaker, and never fails it.
    Never use it to give something time to happen: `wait_for` that.
    """
    time.sleep(seconds)
