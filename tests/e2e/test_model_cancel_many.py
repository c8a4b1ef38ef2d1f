"""Many requests given up at random moments, in every way a client can: vLLM stops each, and nothing is left of any."""

from __future__ import annotations

import http.client
import json
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from support.cut_line import CutLine
from support.metrics_page import read_metrics
from support.model_requests import prompt
from support.open_stream import OpenStream
from support.patience import pause, wait_for
from support.stop_notes import Notes
from support.wide_server import OWN, WIDE_SLOTS, begun
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from support.stop_notes import Notes
    from vllm_env.serve.server import TritonServer

pytestmark = pytest.mark.e2e
PROMPT, ANSWER = FACTS[2]
LONG = {"temperature": 0, "max_tokens": 60_000, "ignore_eos": True, **OWN}  # nothing but its client stops it
CLIENTS = 8  # that give up
OTHERS = WIDE_SLOTS - CLIENTS  # requests that go on meanwhile; whoever waits for a slot is in test_model_cancel.py
LATEST = 0.3  # s after sending
PATIENCE = 240.0


def cancel(server: TritonServer, name: str, after: float) -> None:
    """The client cancels its stream."""
    with OpenStream(server.grpc_url, prompt(f"{name} {PROMPT}", LONG, stream=True)) as one:
        pause(after)
        one.cancel()


def cut(server: TritonServer, name: str, after: float) -> None:
    """The client of a stream is gone: its connection is closed."""
    with CutLine(server.ports.grpc) as line, OpenStream(line.url, prompt(f"{name} {PROMPT}", LONG, stream=True)):
        pause(after)
        line.cut()


def close(server: TritonServer, name: str, after: float) -> None:
    """The client of an HTTP stream closes its connection; the server reads nothing there, so its next write finds it out."""
    connection = http.client.HTTPConnection("127.0.0.1", server.ports.http, timeout=PATIENCE)
    body = json.dumps({"text_input": f"{name} {PROMPT}", "stream": True, "sampling_parameters": json.dumps(LONG)})
    connection.request("POST", "/v2/models/vllm/generate_stream", body, {"Content-Type": "application/json"})
    pause(after)
    connection.close()


WAYS = (cancel, cut, close)
COUNTS = [60, pytest.param(1000, marks=pytest.mark.slow)]


@pytest.mark.parametrize("count", COUNTS)
def test_each_is_stopped(wide_server: TritonServer, notes: Notes, count: int) -> None:
    """On an idle server one by one, then beside others that go on: vLLM has nothing to do in the end."""
    seed = random.Random(count)
    names = [f"{count}-{number}" for number in range(count)]
    after = {name: seed.uniform(0, LATEST) for name in names}
    ways = {name: seed.choice(WAYS) for name in names}

    def running() -> str:
        return f"the state of {sorted(notes.running())}"

    def give_up(name: str) -> None:
        ways[name](wide_server, name, after[name])

    alone, beside = names[: count // 2], names[count // 2 :]
    for name in alone:
        give_up(name)
        wait_for(lambda: not notes.running(), running)
    wait_for(lambda: _work(wide_server) == 0, running)
    with ExitStack() as stack:
        requests = [prompt(f"{count}-other-{number} {PROMPT}", LONG, stream=True) for number in range(OTHERS)]
        others = [stack.enter_context(begun(wide_server, one)) for one in requests]
        wait_for(lambda: _work(wide_server) == OTHERS, running)
        with ThreadPoolExecutor(CLIENTS) as clients:
            list(clients.map(give_up, beside))
        wait_for(lambda: len(notes.running()) == OTHERS, running)
        assert not [one for one in others if one.ended]
    wait_for(lambda: _work(wide_server) == 0 and not notes.running(), running)
    with begun(wide_server, prompt(PROMPT, {"temperature": 0, **OWN}, stream=True)) as last:
        last.wait_end(PATIENCE)
    assert "".join(event.text for event in last.events) == ANSWER


def _work(server: TritonServer) -> float:
    page = read_metrics(f"http://127.0.0.1:{server.ports.metrics}/metrics")
    return page.total("vllm:num_requests_running") + page.total("vllm:num_requests_waiting")
