"""Wait for what comes after an answer, however slow the machine is."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_env.serve.server import TritonServer

LIMIT = 240.0  # s until what must come is given up


def wait_for(condition: Callable[[], Any], what: str) -> None:
    """Return once the condition holds.

    Raises:
        AssertionError: It does not within `LIMIT`; the error says ``what``.
    """
    until = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.1)


def wait_for_line(server: TritonServer, text: str) -> None:
    """Return once the server's log has the text.

    Triton writes what a Python model logs in a thread of its own, so an answer may be there before the line that explains it.
    """
    wait_for(lambda: text in server.log.read_text(errors="replace").replace('\\"', '"'), f"{text!r} in the server's log")
