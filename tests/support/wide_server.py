"""The bounds of `wide_server` (tests/e2e/conftest.py), and requests that they may refuse where a machine is busy."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from support.clock import now
from support.open_stream import OpenStream

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vllm_env.serve.server import TritonServer

WIDE_SLOTS = 20  # max_num_seqs
QUEUE_SECONDS = 2  # less than the default deadline
TIMEOUT_SECONDS = 4
GRACE_SECONDS = 3
OWN = {"timeout": 3_600_000_000}  # us: a request's own deadline, in place of the default one
QUEUED = f"the model has not begun to work on the request after {QUEUE_SECONDS} s in the queue; try again later"
PATIENCE = 240.0


@contextmanager
def begun(server: TritonServer, request: Mapping[str, Any]) -> Iterator[OpenStream]:
    """Send a request until vLLM has begun it; where its first output came too late, as on a busy machine, it is sent again."""
    until = now() + PATIENCE
    while True:
        with OpenStream(server.grpc_url, request) as stream:
            first, *_ = stream.wait(1, PATIENCE)
            if first.error != QUEUED:
                assert not first.error, first.error
                yield stream
                return
        assert now() < until
