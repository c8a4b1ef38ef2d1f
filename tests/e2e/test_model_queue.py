"""What vLLM does not begin in time is refused, and what has no deadline of its own has the model's."""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import pytest

from support.clock import now
from support.metrics_page import read_metrics
from support.model_requests import prompt
from support.open_stream import OpenStream
from support.patience import wait_for
from support.reference import ONE_THREAD
from support.settings import with_metrics, with_parameter
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.serving import Serve
    from vllm_env.serve.server import TritonServer

pytestmark = pytest.mark.e2e
PROMPT, _ = FACTS[2]
OWN = {"timeout": 3_600_000_000}  # us
LONG = {"temperature": 0, "max_tokens": 60_000, "ignore_eos": True}
QUEUED = "the model has not begun to work on the request after 1 s in the queue; try again later"
EXPIRED = "the default timeout of 4 s expired before the request had finished"
PATIENCE = 240.0


def prepare(model: Path) -> None:
    """Bound the time in the queue to less than the default deadline, and let the metrics page count requests."""
    with_parameter(model, "MAX_QUEUE_SECONDS", "1")
    with_parameter(model, "DEFAULT_TIMEOUT_SECONDS", "4")
    with_metrics(model)


@pytest.fixture(scope="module")
def bounded(serving: Serve, long_arguments: dict[str, object]) -> Iterator[TritonServer]:
    """A server that works on one request at a time."""
    with serving({**long_arguments, "max_num_seqs": 1}, environment=ONE_THREAD, prepare=prepare) as server:
        yield server


@contextmanager
def working(server: TritonServer) -> Iterator[OpenStream]:
    """A stream that fills the engine; where its first token came too late, as on a busy machine, it is sent again."""
    until = now() + PATIENCE
    while True:
        with OpenStream(server.grpc_url, prompt(PROMPT, {**LONG, **OWN}, stream=True)) as stream:
            first, *_ = stream.wait(1, PATIENCE)
            if not first.error:
                yield stream
                return
        assert (first.error, now() < until) == (QUEUED, True)


def test_what_waits_too_long_is_refused_and_dropped(bounded: TritonServer) -> None:
    """Streams and whole answers behind a long one are told UNAVAILABLE, vLLM forgets them, and the long one goes on."""
    short = {"max_tokens": 1, **OWN}
    requests = [prompt(PROMPT, {**short, "n": n}, stream=streaming) for n in (1, 2) for streaming in (False, True)]
    with ExitStack() as stack:
        long = stack.enter_context(working(bounded))
        sent = time.monotonic()  # a clock without the machine's pauses would find an answer of the model's clock too early
        waiting = [stack.enter_context(OpenStream(bounded.grpc_url, one, codes=True)) for one in requests]
        first = waiting[0].wait_end(PATIENCE)
        waited = time.monotonic() - sent
        ends = [first, *(one.wait_end(PATIENCE) for one in waiting[1:])]
        assert {end.error for end in ends} == {QUEUED}
        assert all("UNAVAILABLE" in end.status for end in ends)
        assert waited >= 0.9
        wait_for(lambda: not _waiting(bounded), "the end of the queue")
        long.wait(len(long.events) + 2)
        assert not long.ended


def _waiting(server: TritonServer) -> float:
    return read_metrics(f"http://127.0.0.1:{server.ports.metrics}/metrics").total("vllm:num_requests_waiting")


@pytest.mark.parametrize(("streaming", "n"), [(False, 1), (True, 1), (False, 2)])
def test_what_has_begun_goes_on_until_the_default_deadline(bounded: TritonServer, streaming: bool, n: int) -> None:
    """A whole answer shows nothing before its end, and is not taken for one that waits; of two completions one has begun."""
    asked = prompt(PROMPT, {**LONG, "temperature": 1, "n": n}, stream=streaming)
    until = now() + PATIENCE
    error = QUEUED
    while error == QUEUED and now() < until:  # as it is where a busy machine begins it too late
        with OpenStream(bounded.grpc_url, asked) as request:
            error = request.wait_end(PATIENCE).error
    assert error == EXPIRED
