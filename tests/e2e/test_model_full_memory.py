"""Shared memory runs full while answers are on their way: each client is answered. test_model_faults.py fills TMPDIR."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.model_requests import ask, prompt
from support.open_stream import OpenStream
from support.reference import ONE_THREAD
from support.serving import fill, in_small_place, serve
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.serving import Parts
    from vllm_env.serve.server import TritonServer

pytestmark = pytest.mark.e2e
PROMPT, ANSWER = FACTS[2]
SIZE = "64m"  # as a container has it
# some MB of log probabilities, where Triton's region has 1 MB until it grows
LARGE = {"n": 8, "logprobs": 20, "max_tokens": 200, "ignore_eos": True}
ANSWERED = 120.0


@pytest.fixture(scope="module")
def small_memory(light_parts: Parts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A light server whose shared memory is its own, as in a container; its tests leave it as they found it."""
    small = in_small_place(light_parts, "/dev/shm", tmp_path_factory.mktemp("small"), SIZE)
    with serve(small, environment=ONE_THREAD) as server:
        yield server


def shared_memory(server: TritonServer) -> Path:
    """Return the server's ``/dev/shm`` as it is seen from here."""
    return Path(f"/proc/{server.pid}/root/dev/shm")


@pytest.mark.parametrize("streaming", [False, True])
def test_an_answer_that_does_not_fit_ends_in_an_error(small_memory: TritonServer, streaming: bool) -> None:
    """Triton has closed the request when it finds that out; its client must not wait for what cannot come any more."""
    small = small_memory
    filler = shared_memory(small) / "filler"
    large = prompt(PROMPT, LARGE, stream=streaming, return_logprobs=True)
    fill(filler)
    with ExitStack() as stack:
        requests = [stack.enter_context(OpenStream(small.grpc_url, large)) for _ in range(4)]
        ends = [request.wait_end(ANSWERED) for request in requests]
    assert all(end.final or end.error for end in ends)
    if not streaming:  # streamed, each response is small
        assert "could not be sent" in "".join(end.error for end in ends)
    assert ask(small, PROMPT, {"temperature": 0}).text == PROMPT + ANSWER  # short ones fit all the while
    filler.unlink()
    with OpenStream(small.grpc_url, large) as again:
        assert again.wait_end(ANSWERED).error == ""
