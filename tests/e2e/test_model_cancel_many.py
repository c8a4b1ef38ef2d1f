"""Many requests given up at random moments, in every way a client can: vLLM stops each, and nothing is left of any."""

from __future__ import annotations

import http.client
import json
import random
import statistics
import time
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
    from collections.abc import Callable

    from support.stop_notes import Notes
    from vllm_env.serve.server import TritonServer

pytestmark = pytest.mark.e2e
PROMPT, ANSWER = FACTS[2]
LONG = {"temperature": 0, "max_tokens": 60_000, "ignore_eos": True, **OWN}  # nothing but its client stops it
CLIENTS = 8  # that give up
OTHERS = WIDE_SLOTS - CLIENTS  # requests that go on meanwhile; whoever waits for a slot is in test_model_cancel.py
LATEST = 0.3  # s after sending
PATIENCE = 240.0


def cancel(server: TritonServer, name: str, after: float) -> float:
    """The client cancels its stream."""
    with OpenStream(server.grpc_url, prompt(f"{name} {PROMPT}", LONG, stream=True)) as one:
        pause(after)
        at = time.monotonic()
        one.cancel()
    return at


def cut(server: TritonServer, name: str, after: float) -> float:
    """The client of a stream is gone: its connection is closed."""
    with CutLine(server.ports.grpc) as line, OpenStream(line.url, prompt(f"{name} {PROMPT}", LONG, stream=True)):
        pause(after)
        at = time.monotonic()
        line.cut()
    return at


def close(server: TritonServer, name: str, after: float) -> float:
    """The client of an HTTP stream closes its connection; the server reads nothing there, so its next write finds it out."""
    connection = http.client.HTTPConnection("127.0.0.1", server.ports.http, timeout=PATIENCE)
    body = json.dumps({"text_input": f"{name} {PROMPT}", "stream": True, "sampling_parameters": json.dumps(LONG)})
    connection.request("POST", "/v2/models/vllm/generate_stream", body, {"Content-Type": "application/json"})
    pause(after)
    at = time.monotonic()
    connection.close()
    return at


WAYS = (cancel, cut, close)
COUNTS = [60, pytest.param(1000, marks=pytest.mark.slow)]


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
def test_each_is_stopped(wide_server: TritonServer, notes: Notes, count: int) -> None:
    """On an idle server one by one, then beside others that go on: vLLM has nothing to do in the end."""
    seed = random.Random(count)
    names = [f"{count}-{number}" for number in range(count)]
    after = {name: seed.uniform(0, LATEST) for name in names}
    ways = {name: seed.choice(WAYS) for name in names}
    gone: dict[str, float] = {}

    def running() -> str:
        return f"the state of {sorted(_running(notes))}"

    def give_up(name: str) -> None:
        gone[name] = ways[name](wide_server, name, after[name])

    alone, beside = names[: count // 2], names[count // 2 :]
    for name in alone:
        give_up(name)
        wait_for(lambda: not _running(notes), running)
    wait_for(lambda: _work(wide_server) == 0, running)
    with ExitStack() as stack:
        requests = [prompt(f"{count}-other-{number} {PROMPT}", LONG, stream=True) for number in range(OTHERS)]
        others = [stack.enter_context(begun(wide_server, one)) for one in requests]
        wait_for(lambda: _work(wide_server) == OTHERS, running)
        with ThreadPoolExecutor(CLIENTS) as clients:
            list(clients.map(give_up, beside))
        wait_for(lambda: len(_running(notes)) == OTHERS, running)
        assert not [one for one in others if one.ended]
    wait_for(lambda: _work(wide_server) == 0 and not _running(notes), running)
    with begun(wide_server, prompt(PROMPT, {"temperature": 0, **OWN}, stream=True)) as last:
        last.wait_end(PATIENCE)
    assert "".join(event.text for event in last.events) == ANSWER
    _tell("idle", notes, {name: gone[name] for name in alone}, ways)
    _tell("busy", notes, {name: gone[name] for name in beside}, ways)


def _work(server: TritonServer) -> float:
    page = read_metrics(f"http://127.0.0.1:{server.ports.metrics}/metrics")
    return page.total("vllm:num_requests_running") + page.total("vllm:num_requests_waiting")


def _running(notes: Notes) -> set[str]:
    """Return the names of requests that the model has taken and that have not ended."""
    found = notes.read()
    return found["taken"].keys() - found["ended"].keys()


def _tell(state: str, notes: Notes, gone: dict[str, float], ways: dict[str, Callable[..., float]]) -> None:
    """Print how long it took: from the client's going, or the model's taking what came later, to vLLM's being told.

    A closed HTTP connection is found out by writes, so not while vLLM has not begun with the request: that is told as well.
    """
    found = notes.read()
    for way in WAYS:
        names = [name for name in gone if name in found["taken"] and ways[name] is way]
        left = {name: max(gone[name], found["taken"][name]) for name in names}
        _print(f"{state}, {way.__name__}", left, found)
        if way is close:
            begun = {name: max(at, found["begun"].get(name, 0)) for name, at in left.items()}
            _print(f"{state}, {way.__name__}, from the first output where that came later", begun, found)


def _print(what: str, since: dict[str, float], found: dict[str, dict[str, float]]) -> None:
    took = sorted(1000 * (found["aborted"].get(name, found["ended"][name]) - at) for name, at in since.items())
    if took:
        p99 = took[int(0.99 * (len(took) - 1))]
        print(f"{what}: {len(took)}, median {statistics.median(took):.0f} ms, p99 {p99:.0f}, max {took[-1]:.0f}")
