"""A request that nobody waits for any more is stopped in the engine, in whatever state it is."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from support.metrics_page import read_metrics
from support.model_requests import ask, prompt
from support.open_stream import OpenStream
from support.patience import pause, wait_for
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_env.serve.server import TritonServer

pytestmark = pytest.mark.e2e
PROMPT, ANSWER = FACTS[2]
SLOTS = 2  # as conftest.py gives the engine
LONG = {"temperature": 0, "max_tokens": 60_000, "ignore_eos": True}
# A slot that was freed in time is one that the next request gets while another long request, begun with the first, still
# runs. That holds on a busy machine as well, where everything takes longer; test_watch.py has the 0.1 s.
PATIENCE = 240.0
BLOCKED = 6.0  # s; a long request takes several times that on the fastest machine


@pytest.fixture
def occupied(long_server: TritonServer) -> Iterator[list[OpenStream]]:
    """Streams that fill every slot of the engine, each with tokens coming in."""
    with ExitStack() as stack:
        requests = [OpenStream(long_server.grpc_url, prompt(PROMPT, LONG, stream=True)) for _ in range(SLOTS)]
        streams = [stack.enter_context(request) for request in requests]
        for one in streams:
            one.wait(3)
        yield streams
    wait_for_slot(long_server)


def wait_for_slot(server: TritonServer, limit: float = PATIENCE) -> None:
    """Return when the engine has begun a short request, which takes a free slot."""
    with OpenStream(server.grpc_url, prompt(PROMPT, {"max_tokens": 1}, stream=True)) as short:
        short.wait_end(limit)


def test_a_full_engine_makes_others_wait(long_server: TritonServer, occupied: list[OpenStream]) -> None:
    """What the other tests stand on: without a cancellation the next request gets nothing."""
    with pytest.raises(TimeoutError):
        wait_for_slot(long_server, BLOCKED)


def test_cancelled_stream_frees_its_slot(long_server: TritonServer, occupied: list[OpenStream]) -> None:
    """The client is told CANCELLED, and the engine takes the next request at once."""
    occupied[0].cancel()
    wait_for_slot(long_server)
    assert not occupied[1].ended
    assert "CANCELLED" in occupied[0].wait_end(PATIENCE).status


def test_cancelled_waiting_request_is_never_begun(long_server: TritonServer, occupied: list[OpenStream]) -> None:
    """A request that waits for a slot is dropped from the queue: the one behind it is next."""
    with OpenStream(long_server.grpc_url, prompt(PROMPT, LONG, stream=True)) as waiting:
        pause(0.3)
        assert waiting.events == []
        waiting.cancel()
        assert "CANCELLED" in waiting.wait_end(PATIENCE).status
    pause(0.3)
    occupied[0].cancel()
    wait_for_slot(long_server)
    assert not occupied[1].ended
    assert [event.text for event in waiting.events] == [""]


def test_cancelled_whole_answer_frees_its_slot(long_server: TritonServer) -> None:
    """A request that is not streamed, of which nothing has been sent, is stopped the same."""
    with ExitStack() as stack:
        request = prompt(PROMPT, LONG)
        streams = [stack.enter_context(OpenStream(long_server.grpc_url, request)) for _ in range(SLOTS)]
        pause(0.5)
        streams[0].cancel()
        wait_for_slot(long_server)
        assert not streams[1].ended


CLIENT = """
import sys, tritonclient.grpc as g
sys.path.insert(0, sys.argv[2])
from support.open_stream import OpenStream
from support.clock import now
from support.model_requests import prompt
with OpenStream(sys.argv[1], prompt(sys.argv[3], eval(sys.argv[4]), stream=True)) as one:
    one.wait(3); print("streaming", flush=True); one.wait_end(60)
"""


def test_client_that_dies_frees_its_slot(long_server: TritonServer, occupied: list[OpenStream], checkout: Any) -> None:
    """A gRPC client killed in the middle of its stream counts as a cancellation."""
    occupied[0].cancel()
    argv = [sys.executable, "-c", CLIENT, long_server.grpc_url, str(checkout / "tests"), PROMPT, repr(LONG)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout
        assert client.stdout.readline() == "streaming\n"
        client.kill()
    wait_for_slot(long_server)
    assert not occupied[1].ended


@pytest.mark.parametrize("streaming", [False, True])
def test_deadline_ends_a_request(long_server: TritonServer, streaming: bool) -> None:
    """`timeout` (microseconds) stops a request that takes longer: an error, and its slot is free while its twin goes on."""
    request = prompt(PROMPT, {**LONG, "timeout": 500_000}, stream=streaming)
    with (
        OpenStream(long_server.grpc_url, prompt(PROMPT, LONG, stream=True)) as twin,
        OpenStream(long_server.grpc_url, request) as late,
    ):
        end = late.wait_end(PATIENCE)
        assert "timeout of 500000 us expired" in end.error
        wait_for_slot(long_server)
        assert not twin.ended


def test_deadline_of_a_waiting_request(long_server: TritonServer, occupied: list[OpenStream]) -> None:
    """A request whose time is over before it is begun is answered in time, not when its turn comes."""
    with OpenStream(long_server.grpc_url, prompt(PROMPT, {"timeout": 300_000})) as late:
        end = late.wait_end(PATIENCE)
    assert not any(one.ended for one in occupied)
    assert "timeout of 300000 us expired" in end.error


def test_deadline_that_is_met_changes_nothing(long_server: TritonServer) -> None:
    """A request that ends in time is answered as ever."""
    assert ask(long_server, PROMPT, {"temperature": 0, "timeout": 240_000_000}).text == PROMPT + ANSWER


def test_http_client_that_goes_away(long_server: TritonServer) -> None:
    """Closing its connection harms nobody; stock Triton does not notice it, and a whole answer runs to its end."""
    before = long_answers(long_server)
    connection = http.client.HTTPConnection(urlsplit(long_server.http_url).netloc)
    request = {"text_input": PROMPT, "max_tokens": 2000, "ignore_eos": True}
    connection.request("POST", "/v2/models/vllm/generate", json.dumps(request))
    pause(0.05)
    connection.close()
    assert ask(long_server, PROMPT, {"temperature": 0}).text == PROMPT + ANSWER
    wait_for(lambda: long_answers(long_server) == before + 1, "the end of the answer")


def test_http_stream_whose_client_goes_away(long_server: TritonServer) -> None:
    """Triton notices when it writes to it, and the slot is free while another request, begun before it, still runs."""
    with OpenStream(long_server.grpc_url, prompt(PROMPT, LONG, stream=True)) as other:
        other.wait(3)
        connection = http.client.HTTPConnection(urlsplit(long_server.http_url).netloc, timeout=PATIENCE)
        connection.request("POST", "/v2/models/vllm/generate_stream", json.dumps({"text_input": PROMPT, "stream": True, **LONG}))
        assert b"text_output" in connection.getresponse().readline()
        connection.close()
        wait_for_slot(long_server)
        assert not other.ended
    wait_for_slot(long_server)


def long_answers(server: TritonServer) -> float:
    """Return how many answers of more than a thousand tokens have ended well; no other test here waits for one."""
    page = read_metrics(f"http://127.0.0.1:{server.ports.metrics}/metrics")
    name = "vllm:request_generation_tokens"
    shorter = (value for found, labels, value in page.samples if found == f"{name}_bucket" and float(labels["le"]) == 1000)
    return page.total(f"{name}_count") - sum(shorter)
