"""What is left of a model whose stub has died: the second column of the table in docs/troubleshooting.md."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from support.blocked_sender import BLOCKED, with_blocked_sender
from support.clock import now
from support.model_control import load, unload
from support.model_requests import ask, prompt
from support.open_stream import OpenStream
from support.patience import pause, wait_for
from support.repositories import serves_since
from support.server_processes import engines, stubs
from support.serving import EXPLICIT
from support.settings import openai_url, with_openai
from support.triton_client import get, post
from vllm_env.serve.processes import is_alive
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from pathlib import Path

    from support.serving import Parts, Serve
    from vllm_env.serve.server import TritonServer

pytestmark = pytest.mark.e2e
PROMPT, WORDS = FACTS[2]
GREEDY = {"temperature": 0, "max_tokens": 16}
ENGINE_SECONDS = 5.0  # on a machine without other work
BUSY = 5  # times as long on one with other work


def test_a_dead_stub(light_serving: Serve, light_parts: Parts) -> None:
    """Its engine ends, its port is closed, new requests get errors, and an unload and a load serve again."""

    def prepare(model: Path) -> None:
        with_blocked_sender(model)
        if light_parts.engine:
            with_openai(model)

    arguments = (EXPLICIT, "--load-model=vllm", "--exit-timeout-secs=1")  # for requests that are never answered
    with light_serving(prepare=prepare, arguments=arguments) as server, ExitStack() as stack:
        asked = [prompt(BLOCKED, GREEDY, stream=streaming) for streaming in (True, False)]
        held = [stack.enter_context(OpenStream(server.grpc_url, one, own_connection=True)) for one in asked]
        pause(3)  # both have reached the stub
        (stub,), parts = stubs(server), engines(server)
        # It may hold a lock of Triton's shared memory for a moment, as at any kill; then the server ends after ten seconds.
        stub.kill()
        began = now()
        wait_for(lambda: not any(map(is_alive, parts)), "the engine's end")
        waited = now() - began
        print(f"the engine had ended after {waited:.1f} s")
        assert waited < BUSY * ENGINE_SECONDS

        assert "is not healthy" in ask(server, PROMPT).error
        assert get(server.http_url, "/v2/health/live")[0] == 200
        seen = 400 if serves_since("26.03") else 200
        for path in ("/v2/health/ready", "/v2/models/vllm/ready"):
            wait_for(lambda path=path: get(server.http_url, path)[0] == seen, f"{seen} from {path}")
        if light_parts.engine:
            with pytest.raises(OSError, match="refused"):
                get(openai_url(server), "/health")

        assert unload(server)[0] == 200
        assert states(server) == ["UNLOADING"]
        assert load(server)[0] == 200
        assert ask(server, PROMPT, GREEDY, exclude_input_in_output=True).text == WORDS
        assert states(server) == ["READY"]
        assert get(server.http_url, "/v2/health/ready")[0] == 200
        assert not any(one.ended for one in held)


def states(server: TritonServer) -> list[str]:
    """Return the states of the model's versions."""
    found = json.loads(post(server.http_url, "/v2/repository/index", {}, timeout=60.0)[1])
    return [version["state"] for version in found]
