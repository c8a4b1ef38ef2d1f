"""What vLLM does not begin in time is refused, and what has no deadline of its own has the model's."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from support.clock import now
from support.metrics_page import read_metrics
from support.model_requests import prompt
from support.open_stream import OpenStream
from support.patience import wait_for
from support.wide_server import OWN, QUEUE_SECONDS, QUEUED, TIMEOUT_SECONDS, WIDE_SLOTS, begun
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from vllm_env.serve.server import TritonServer

pytestmark = pytest.mark.e2e
PROMPT, _ = FACTS[2]
LONG = {"temperature": 0, "max_tokens": 60_000, "ignore_eos": True}
EXPIRED = f"the default timeout of {TIMEOUT_SECONDS} s expired before the request had finished"
UNLOADED = "the model was unloaded before the request had finished"
PATIENCE = 240.0


@pytest.mark.slow
def test_what_waits_too_long_is_refused_and_dropped(wide_server: TritonServer) -> None:
    """Streams and whole answers behind a long one are refused, vLLM forgets them, and the long one goes on."""
    short = {"max_tokens": 1, **OWN}
    requests = [prompt(PROMPT, {**short, "n": n}, stream=streaming) for n in (1, 2) for streaming in (False, True)]
    with ExitStack() as stack:
        filling = prompt(PROMPT, {**LONG, **OWN, "temperature": 1, "n": WIDE_SLOTS}, stream=True)  # all slots
        long = stack.enter_context(begun(wide_server, filling))
        sent = time.monotonic()  # a clock without the machine's pauses would find an answer of the model's clock too early
        # Without the statuses of gRPC: Triton 24.10 may die of a stream that it ends with one.
        waiting = [stack.enter_context(OpenStream(wide_server.grpc_url, one)) for one in requests]
        first = waiting[0].wait_end(PATIENCE)
        waited = time.monotonic() - sent
        ends = [first, *(one.wait_end(PATIENCE) for one in waiting[1:])]
        assert {end.error for end in ends} == {QUEUED}
        assert waited >= QUEUE_SECONDS - 0.1
        wait_for(lambda: not _waiting(wide_server), "the end of the queue")
        long.wait(len(long.events) + 2)
        assert not long.ended


def _waiting(server: TritonServer) -> float:
    return read_metrics(f"http://127.0.0.1:{server.ports.metrics}/metrics").total("vllm:num_requests_waiting")


@pytest.mark.slow
@pytest.mark.parametrize(("streaming", "n"), [(False, 1), (True, 1), (False, 2)])
def test_what_has_begun_goes_on_until_the_default_deadline(wide_server: TritonServer, streaming: bool, n: int) -> None:
    """A whole answer shows nothing before its end, and is not taken for one that waits; of two completions one has begun."""
    asked = prompt(PROMPT, {**LONG, "temperature": 1, "n": n}, stream=streaming)
    until = now() + PATIENCE
    error = QUEUED
    while error == QUEUED and now() < until:  # as it is where a busy machine begins it too late
        with OpenStream(wide_server.grpc_url, asked) as request:
            error = request.wait_end(PATIENCE).error
    assert error == EXPIRED


@pytest.mark.slow
@pytest.mark.ends_server
def test_what_a_real_engine_works_on_is_answered_when_the_server_ends(wide_server: TritonServer) -> None:
    """SIGTERM: after the grace period each is told UNAVAILABLE, and the server ends well; test_model_exit.py has more of them."""
    asked = [prompt(PROMPT, {**LONG, **OWN}, stream=streaming) for streaming in (True, False)]
    with ExitStack() as stack:
        streams = [stack.enter_context(begun(wide_server, asked[0])) for _ in range(2)]
        streams.append(stack.enter_context(OpenStream(wide_server.grpc_url, asked[1])))

        def all_run() -> bool:
            if streams[-1].ended:  # a busy machine began it too late
                streams[-1] = stack.enter_context(OpenStream(wide_server.grpc_url, asked[1]))
            return _running(wide_server) == len(streams)

        wait_for(all_run, "all requests in the engine")
        os.kill(wide_server.pid, signal.SIGTERM)
        assert {stream.wait_end(PATIENCE).error for stream in streams} == {UNLOADED}
    child = wide_server._child
    assert child is not None
    assert child.wait(PATIENCE) == 0, wide_server.log.read_text(errors="replace")[-4000:]


def _running(server: TritonServer) -> float:
    return read_metrics(f"http://127.0.0.1:{server.ports.metrics}/metrics").total("vllm:num_requests_running")
