"""An engine over two machines without Ray: each part is killed in turns, and it serves again."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from support.clock import now
from support.leftovers import leftovers, wait_for_none
from support.machines import Machines
from support.model_requests import ask
from support.patience import LIMIT, pause, wait_for
from support.server_processes import engines
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from pathlib import Path

    from support.serving import Parts
    from vllm_env.serve.server import TritonServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3600)]
PROMPT, WORDS = FACTS[2]
ROUNDS = 3
AGAIN_SECONDS = 90.0  # on a machine without other work
BUSY = 4  # times as long on one with other work


def test_each_part_is_killed_in_turns(parts: Parts, tmp_path: Path) -> None:
    """Leader, node and EngineCore, three rounds: the same answer within 90 s each time, and in the end nothing is left."""
    before = leftovers(os.getpid())
    machines = Machines(parts, tmp_path)
    waits: list[str] = []
    with ExitStack() as stack:
        stack.callback(machines.close)
        machines.start_node()
        server = stack.enter_context(machines.server())
        assert answer(server) == WORDS
        for number in range(ROUNDS):
            began = now()
            for engine in engines(server):
                engine.kill()
            waits.append(served_again(server, began, f"{number}: EngineCore"))

            began = now()
            if number == 0:
                machines.end_node(signal.SIGKILL)
                # Without any request: with NCCL, one would wait for minutes.
                wait_for(lambda: "has lost a worker" in machines.server_log(), "the loss in the log")
                machines.start_node()
            else:
                # One of its workers; the program starts them again.
                machines.node_processes()[-1].kill()
            waits.append(served_again(server, began, f"{number}: node"))

            began = now()
            os.kill(server.pid, signal.SIGKILL)
            server.stop()
            server = stack.enter_context(machines.server())
            waits.append(served_again(server, began, f"{number}: leader"))
    print(*waits, sep="\n")
    wait_for_none(before)


def served_again(server: TritonServer, began: float, what: str) -> str:
    """Return how long it took until the answer was the right one again."""
    while answer(server) != WORDS:
        assert now() - began < BUSY * LIMIT, what
        pause(1)
    waited = now() - began
    assert waited < BUSY * AGAIN_SECONDS, f"{what}: {waited:.0f} s"
    return f"{what} killed: served again after {waited:.0f} s"


def answer(server: TritonServer) -> str:
    """Return the answer, or nothing if there is an error."""
    found = ask(server, PROMPT, {"temperature": 0, "max_tokens": 64}, exclude_input_in_output=True)
    return "" if found.error else found.text
