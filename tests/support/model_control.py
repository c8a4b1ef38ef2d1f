"""Loads and unloads models on a server in explicit mode."""

from __future__ import annotations

import contextlib
import threading
from http import HTTPStatus
from typing import TYPE_CHECKING

from support.instances import said
from support.patience import wait_for
from support.server_processes import stubs
from support.triton_client import post

if TYPE_CHECKING:
    from vllm_env.serve.server import TritonServer

GIVEN_UP = "is not healthy"
"""Triton 24.10 says this of a loading process if the machine stood still for a second."""
NOTICED = "the server has given this load up"
"""The log's line of a process that has noticed it. With several instances, the answer may be another one's error."""
TOLERATED_SINCE = "25.08"
"""From this release on, Triton waits for a stub that is paused for `PAUSE_SECONDS`."""
PAUSE_SECONDS = 3.0
LOADS = 5  # at most, of a load that the server gives up
SECONDS = 800.0  # below the limit of a test


def load(server: TritonServer, name: str = "vllm") -> tuple[int, str]:
    """Load a model, and again if the server has given the load up; return the status and the answer's text."""
    before = stubs(server)
    for _ in range(LOADS):
        start = len(said(server))
        status, told = _control(server, name, "load")
        if status == HTTPStatus.OK or not (GIVEN_UP in told or NOTICED in said(server, start)):
            break
        # That load's process goes on for a while, and on a busy machine it would slow the next load down.
        wait_for(lambda: stubs(server) <= before, "the end of the process that was given up")
    return status, told


def unload(server: TritonServer, name: str = "vllm") -> tuple[int, str]:
    """Unload a model; return the status and the answer's text."""
    return _control(server, name, "unload")


def _control(server: TritonServer, name: str, verb: str) -> tuple[int, str]:
    answers: list[tuple[int, str]] = []

    def ask() -> None:
        # It fails where the server ends, and waits for ever where a process of the server's still has the connection.
        with contextlib.suppress(OSError):
            answers.append(post(server.http_url, f"/v2/repository/models/{name}/{verb}", {}, timeout=SECONDS))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    wait_for(lambda: not asking.is_alive() or not server.running, f"the {verb} of {name}", limit=SECONDS)
    assert answers, f"no answer to the {verb} of {name}:\n{server.log.read_text(errors='replace')[-4000:]}"
    return answers[0]
