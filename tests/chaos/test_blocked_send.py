"""A response that the server never takes ends the model, and the other requests, in time."""

from __future__ import annotations

import dataclasses
import shlex
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.blocked_sender import BLOCKED, with_blocked_sender
from support.clock import now
from support.instances import with_instances
from support.leftovers import name_of
from support.manifests import KUBERNETES
from support.model_requests import ask, prompt
from support.namespaces import with_own_processes
from support.open_stream import OpenStream
from support.patience import wait_for, wait_for_line
from support.reference import ONE_THREAD
from support.repositories import serves_since
from support.server_processes import engines, stubs
from support.serving import serve
from support.settings import with_parameter
from support.triton_client import get
from triton_vllm.base.errors import NOT_TAKEN
from triton_vllm.base.processes import start_time
from vllm_env.serve.processes import is_alive
from vllm_env.serve.standin import FACTS
from vllm_env.triton.root import backend_arguments

if TYPE_CHECKING:
    from support.serving import Parts
    from vllm_env.serve.server import TritonServer

pytestmark = pytest.mark.e2e
PROMPT, _ = FACTS[2]
LONG = {"temperature": 0, "max_tokens": 60_000, "ignore_eos": True}
SEEN_SECONDS = 40.0  # on a machine without other work
BUSY = 5  # times as long on one with other work


@pytest.fixture
def contained(light_parts: Parts, tmp_path: Path) -> Parts:
    """What servers are made of; the server is process 1, as in a container."""
    program = tmp_path / "tritonserver"
    server = [str(light_parts.binary), *backend_arguments(light_parts.binary)]
    program.write_text(f'#!/bin/sh\nexec {shlex.join([*with_own_processes(), *server])} "$@"\n')
    program.chmod(0o755)
    return dataclasses.replace(light_parts, binary=program)


def is_alive_by_probe(server: TritonServer) -> bool:
    """Return what ``alive.sh`` says, which the kubelet runs in the container; its first call must find a healthy server."""
    inside = ["nsenter", "--target", str(process_one(server)), "--pid", "--mount"]
    return subprocess.run([*inside, "bash", KUBERNETES / "probes" / "alive.sh"], check=False).returncode == 0


def process_one(server: TritonServer) -> int:
    """Return the id of tritonserver outside."""
    (process,) = [one for one in server.members() if name_of(one) == "tritonserver"]
    return process.pid


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_send_that_never_returns(contained: Parts, light_long_arguments: dict[str, object], count: int) -> None:
    """The others get errors, the log says why, and the model ends, as probes can see."""

    def prepare(model: Path) -> None:
        with_instances(model, count)
        with_parameter(model, "RESPONSE_SENDER_THREADS", "1")
        with_blocked_sender(model)

    arguments = ("--exit-timeout-secs=1",)  # the server waits for the request that is never answered
    seats = {**light_long_arguments, "max_num_seqs": 3}  # for those that stream
    with serve(contained, seats, environment=ONE_THREAD, prepare=prepare, arguments=arguments) as server:
        assert is_alive_by_probe(server)
        with ExitStack() as stack:

            def sent(text: str, *, streaming: bool) -> OpenStream:
                request = prompt(text, LONG, stream=streaming)
                return stack.enter_context(OpenStream(server.grpc_url, request, own_connection=True))

            others = [sent(PROMPT, streaming=True)]
            others[0].wait(1)
            sent(BLOCKED, streaming=True)
            began = now()
            others.append(sent(PROMPT, streaming=True))
            others[1].wait(1)
            others.append(sent(PROMPT, streaming=False))
            ends = [one.wait_end() for one in others]
            waited = max(end.at for end in ends) - began
            assert {end.error for end in ends} == {NOT_TAKEN}
            print(f"count {count}: the others' errors came {waited:.1f} s after the request that blocks")
            assert waited < BUSY * SEEN_SECONDS
        wait_for_line(server, "for 20 s the server has not taken a response")
        wait_for_line(server, "restart tritonserver")
        found = stubs(server) | engines(server)
        wait_for(lambda: not any(map(is_alive, found)), "the end of the model's processes")
        # Before 26.03, Triton looks for no dead stub.
        is_up = get(server.http_url, "/v2/models/vllm/ready")[0] == 200
        assert is_up is not serves_since("26.03")
        assert ask(server, PROMPT).error
        assert get(server.http_url, "/v2/health/live")[0] == 200
        assert not is_alive_by_probe(server)
        Path(f"/tmp/stubs-of-{start_time(process_one(server))}").unlink()  # the probe's notes
        server.kill()
