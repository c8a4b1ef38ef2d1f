"""The server is told to end while requests run that would take minutes: each is answered, and the server ends well."""

from __future__ import annotations

import http.client
import json
import os
import queue
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tritonclient.grpc as grpcclient

from support.clock import now
from support.metrics_page import read_metrics
from support.model_requests import prompt
from support.open_stream import OpenStream
from support.patience import pause, wait_for, wait_for_line
from support.reference import ONE_THREAD
from support.repositories import serves_since
from support.settings import with_metrics, with_parameter
from support.triton_client import tensor
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from support.serving import Serve
    from vllm_env.serve.server import TritonServer

pytestmark = pytest.mark.e2e
PROMPT, _ = FACTS[2]
LONG = {"temperature": 0, "max_tokens": 60_000, "ignore_eos": True}
UNLOADED = "the model was unloaded before the request had finished"
GRACE = 5
PATIENCE = 120.0


def prepare(model: Path) -> None:
    """Give requests in flight a few seconds, and let the metrics page count them."""
    with_parameter(model, "UNLOAD_GRACE_SECONDS", str(GRACE))
    with_metrics(model)


@pytest.mark.parametrize("clients", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_every_request_is_answered_before_the_server_ends(
    light_serving: Serve, light_long_arguments: dict[str, object], no_leftovers: None, clients: int
) -> None:
    """SIGTERM: what cannot finish within the grace period is told UNAVAILABLE, and the server's status is 0."""
    with light_serving(light_long_arguments, environment=ONE_THREAD, prepare=prepare) as server:
        with ExitStack() as stack:
            requests = [prompt(PROMPT, LONG, stream=number % 4 > 0) for number in range(clients)]
            streams = [stack.enter_context(OpenStream(server.grpc_url, one)) for one in requests]
            _wait_until_all_are_taken(server, clients)
            os.kill(server.pid, signal.SIGTERM)
            began = now()
            ends = [stream.wait_end(PATIENCE) for stream in streams]
            print(f"the last of {clients} answered after {now() - began:.1f} s")
        assert {end.error for end in ends} == {UNLOADED}
        assert _status(server) == 0, server.log.read_text(errors="replace")[-4000:]
        said = server.log.read_text(errors="replace")
        assert "Exit timeout expired" not in said
        assert f"requests in flight have {GRACE} s to finish" in said


def test_streams_over_http_are_told_before_the_server_cuts_them_off(
    light_serving: Serve, light_long_arguments: dict[str, object], no_leftovers: None
) -> None:
    """The HTTP endpoint waits for its clients first, and the core knows of no end meanwhile; the model notices it."""
    clients = 8
    with light_serving(light_long_arguments, environment=ONE_THREAD, prepare=prepare) as server:
        with ThreadPoolExecutor(clients) as pool:
            answers = [pool.submit(_stream_over_http, server) for _ in range(clients)]
            _wait_until_all_are_taken(server, clients)
            os.kill(server.pid, signal.SIGTERM)
            ends = [answer.result(PATIENCE) for answer in answers]
        assert {status for status, _ in ends} == {200}  # also of those that had to wait for a slot
        assert [end for _, end in ends if UNLOADED not in end] == []
        assert _status(server) == 0, server.log.read_text(errors="replace")[-4000:]
        said = server.log.read_text(errors="replace")
        assert f"{clients} requests in flight have {GRACE} s to finish" in said
        assert "Exit timeout expired" not in said


def _stream_over_http(server: TritonServer) -> tuple[int, str]:
    """Return the status and the last event of a long stream."""
    body = {"text_input": PROMPT, "stream": True, "parameters": LONG}
    connection = http.client.HTTPConnection("127.0.0.1", server.ports.http, timeout=PATIENCE)
    try:
        connection.request("POST", "/v2/models/vllm/generate_stream", json.dumps(body))
        answer = connection.getresponse()
        events = answer.read().decode().split("\n\n")
    finally:
        connection.close()
    return answer.status, [event for event in events if event][-1]


def _status(server: TritonServer) -> int | None:
    """Return the server's status once it has ended."""
    child = server._child
    assert child is not None
    wait_for(lambda: child.poll() is not None, lambda: f"the server's end\n{server.log.read_text(errors='replace')[-4000:]}")
    return child.returncode


def _wait_until_all_are_taken(server: TritonServer, clients: int) -> None:
    """Return when vLLM has them all; one that comes while the server ends may find its connection closed."""

    def taken() -> float:
        page = read_metrics(f"http://127.0.0.1:{server.ports.metrics}/metrics")
        return page.total("vllm:num_requests_running") + page.total("vllm:num_requests_waiting")

    wait_for(lambda: taken() >= clients, lambda: f"{clients} requests: vLLM has {taken():.0f}")


def test_a_stream_that_its_client_keeps_open(light_serving: Serve, no_leftovers: None) -> None:
    """After its answers it holds tritonserver, whatever the model: closed within the server's 30 s, all ends well.

    A Python model of ten lines is held the same: the server does not begin to unload it, gives up after its 30 s and then waits
    for the client, to end by SIGABRT. The final response has gone out by then, and a model can end no stream. 26.07 waits for
    the client before it says that it unloads anything.
    """
    with light_serving(environment=ONE_THREAD) as server:
        client = grpcclient.InferenceServerClient(server.grpc_url)
        got: queue.Queue[object] = queue.Queue()
        client.start_stream(lambda result, error: got.put(error or result))
        client.async_stream_infer("vllm", [tensor("text_input", PROMPT)], enable_empty_final_response=True)
        assert not isinstance(got.get(timeout=PATIENCE), Exception)
        os.kill(server.pid, signal.SIGTERM)
        if serves_since("26.07"):
            pause(2.0)
        else:
            wait_for_line(server, "unloading models")
        client.stop_stream()
        client.close()
        assert _status(server) == 0, server.log.read_text(errors="replace")[-4000:]
        assert "[vllm] unloaded" in server.log.read_text(errors="replace")
