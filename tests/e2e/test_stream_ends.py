"""However streams end, an unload ends well afterwards, and leaves nothing behind.

Of stock Triton 24.10 itself: its gRPC front end loses a request whose client leaves while it handles the final flag, and the
model is never unloaded; also a model of 20 lines without vLLM. So the flag goes alone and a little later (base/triton.py). A
killed client may stop the front end for ever (docs/troubleshooting.md), so none is killed here.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from support.departures import MOMENTS, STREAMS
from support.instances import said, with_instances
from support.model_control import load, unload
from support.model_requests import ask
from support.patience import wait_for
from support.reference import ONE_THREAD
from support.server_processes import engines, stubs
from support.serving import EXPLICIT
from support.settings import with_parameter
from support.triton_client import post
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from pathlib import Path

    from support.serving import Serve
    from vllm_env.serve.server import TritonServer

pytestmark = pytest.mark.e2e
PROMPT, ANSWER = FACTS[2]
ROUNDS = 40
_TESTS = os.fspath(pathlib.Path(__file__).parents[1])
GRACE = 5
LIMIT = 120.0
"""Seconds; an end takes the grace period and a few more. One that hangs takes for ever."""
SLOTS = {"max_num_seqs": 2 * STREAMS}
# On a machine with much other work a client may leave later than the pause before the flag.
RACE = "leaves at the last data"
"""A moment at which Triton itself may fail."""


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("moment", [pytest.param(moment, marks=pytest.mark.slow if moment == RACE else []) for moment in MOMENTS])
def test_an_unload_ends_after_streams_that_ended(
    light_serving: Serve, light_long_arguments: dict[str, object], no_leftovers: None, moment: str, count: int
) -> None:
    """The model is gone with its processes, and a new load answers."""
    arguments = {**light_long_arguments, **SLOTS}
    with light_serving(
        arguments, environment=ONE_THREAD, arguments=(EXPLICIT,), prepare=lambda model: _prepare(model, count)
    ) as server:
        assert load(server)[0] == 200, said(server)[-4000:]
        _leave(server, moment)
        unload(server)
        wait_for(
            lambda: _state(server) == "UNAVAILABLE" and not stubs(server) | engines(server),
            lambda: f"the unload: {_state(server)}, {stubs(server)}\n{said(server)[-4000:]}",
            limit=LIMIT,
        )
        load(server)
        assert ask(server, PROMPT, {"temperature": 0, "max_tokens": 32}).text == PROMPT + ANSWER


def _prepare(model: Path, count: int) -> None:
    with_parameter(model, "UNLOAD_GRACE_SECONDS", str(GRACE))
    with_instances(model, count)


def _leave(server: TritonServer, moment: str) -> None:
    """Let a client program open its streams and end them."""
    argv = [sys.executable, "-m", "support.departures", server.grpc_url, moment, str(ROUNDS)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": _TESTS})
    assert done.stdout.strip() == str(ROUNDS * STREAMS), f"{done.stdout}{done.stderr[-4000:]}\n{said(server)[-2000:]}"


def _state(server: TritonServer) -> str:
    _, text = post(server.http_url, "/v2/repository/index", {}, timeout=60)
    (model,) = json.loads(text)
    return str(model.get("state", "UNAVAILABLE"))
