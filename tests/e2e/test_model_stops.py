"""The server is told to end while clients of each kind are there; each stop has a server of its own.

    VLLM_ENV_TEST_STOPS=10    ten stops of each case, with a light server unless --slow is given

A stop prints a line of JSON: what each client got, and how many seconds after SIGTERM all were told and the engine, the stubs
and the server were gone.
The time is not checked, as it depends on the machine; what must be gone within ``UNLOAD_GRACE_SECONDS`` + 5 s is for a quiet one.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.clock import now
from support.leftovers import name_of
from support.metrics_page import read_metrics
from support.patience import pause, wait_for
from support.reference import ONE_THREAD
from support.settings import openai_url, with_metrics, with_openai, with_parameter
from support.stops import (
    FINISHED,
    TOLD,
    TOLD_IN_WORDS,
    DeafGrpc,
    DeafHttp,
    GrpcReader,
    HttpReader,
    IdleGrpc,
    IdleHttp,
    OpenGrpc,
    UnreadGrpc,
    close_all,
)
from vllm_env.serve.processes import is_alive

if TYPE_CHECKING:
    from collections.abc import Callable

    from psutil import Process

    from support.serving import Serve
    from vllm_env.serve.server import TritonServer

pytestmark = pytest.mark.e2e
GRACE = 5
ROUNDS = int(os.environ.get("VLLM_ENV_TEST_STOPS", "0"))
DRAINED = "Exit timeout expired. Exiting immediately"
"""Stock Triton's line if a client still has an HTTP connection after ``--exit-timeout-secs``; its status is then 1."""
PREPARED_S = 5.0  # in which the model finds the HTTP endpoint, so that it can notice its end
SHORTER = f"--exit-timeout-secs={GRACE + 4}"  # as docs/serving.md says


@dataclass(frozen=True)
class Case:
    """Who is there when the server is told to end.

    Attributes:
        name: of the case.
        clients: makes them; called with the server.
        readers: how many requests the model must have.
        arguments: more arguments for tritonserver.
        openai: whether the OpenAI API is served.
        held: whether a client keeps an HTTP connection, which stock Triton waits for.
        stays: whether stock Triton 24.10 waits for a client of gRPC, after the model is gone.
    """

    name: str
    clients: Callable[[TritonServer], list[Any]]
    readers: int
    arguments: tuple[str, ...] = ()
    openai: bool = False
    held: bool = False
    stays: bool = False


def grpc_readers(count: int, server: TritonServer, *, codes: bool = False) -> list[Any]:
    """Return clients of gRPC that read."""
    return [GrpcReader(server.grpc_url, number, codes=codes) for number in range(1, count + 1)]


def http_readers(count: int, server: TritonServer) -> list[Any]:
    """Return clients of HTTP that read."""
    return [HttpReader(server.http_url, number) for number in range(1, count + 1)]


def openai_readers(count: int, server: TritonServer) -> list[Any]:
    """Return clients of the OpenAI API that read."""
    return [HttpReader(openai_url(server), number, openai=True) for number in range(1, count + 1)]


def with_readers(others: Callable[[TritonServer], list[Any]], readers: Callable[[int, TritonServer], list[Any]]) -> Any:
    """Return what makes four of the others and four that read."""
    return lambda server: [*others(server), *readers(4, server)]


CASES = [
    *(Case(f"grpc-{count}", partial(grpc_readers, count), count) for count in (64, 300, 1)),
    Case("status-grpc", partial(grpc_readers, 8, codes=True), 8),
    Case("deaf-grpc", with_readers(lambda s: [DeafGrpc(s.grpc_url) for _ in range(4)], grpc_readers), 8, stays=True),
    Case("unread-grpc", with_readers(lambda s: [UnreadGrpc(s.grpc_url) for _ in range(4)], grpc_readers), 8, stays=True),
    Case("open-grpc", with_readers(lambda s: [OpenGrpc(s.grpc_url) for _ in range(4)], grpc_readers), 8, stays=True),
    Case("deaf-http", with_readers(lambda s: [DeafHttp(s.http_url) for _ in range(4)], http_readers), 8, (SHORTER,), held=True),
    Case("idle-http", with_readers(lambda s: [IdleHttp(s.http_url) for _ in range(4)], http_readers), 4, (SHORTER,), held=True),
    Case("only-idle-http", lambda s: [IdleHttp(s.http_url) for _ in range(4)], 0, (SHORTER,), held=True),
    Case("idle-grpc", with_readers(lambda s: [IdleGrpc(s.grpc_url) for _ in range(4)], grpc_readers), 4),
    *(Case(f"http-{count}", partial(http_readers, count), count) for count in (64, 300, 1)),
    *(Case(f"openai-{count}", partial(openai_readers, count), count, openai=True) for count in (64, 300, 1)),
    Case(
        "deaf-openai",
        with_readers(lambda s: [DeafHttp(openai_url(s), openai=True) for _ in range(4)], openai_readers),
        8,
        openai=True,
    ),
]


def _marked(case: Case) -> Any:
    """Return a case; one that needs the real vLLM, or was not asked for, is slow."""
    slow = [pytest.mark.slow] if case.openai or not ROUNDS else []
    return pytest.param(case, marks=slow, id=case.name)


@pytest.mark.parametrize("number", range(max(ROUNDS, 1)))
@pytest.mark.parametrize("case", map(_marked, CASES))
def test_a_stop(light_serving: Serve, light_long_arguments: dict[str, object], case: Case, number: int) -> None:
    """Each reader has finished or is told UNAVAILABLE, all processes end, and the status is 0, or Triton says why it is not."""

    def prepare(model: Path) -> None:
        with_parameter(model, "UNLOAD_GRACE_SECONDS", str(GRACE))
        with_metrics(model)
        if case.openai:
            with_openai(model)

    engine = {**light_long_arguments, "max_num_seqs": 64}
    clients: list[Any] = []
    with light_serving(engine, environment=ONE_THREAD, prepare=prepare, arguments=case.arguments) as server:
        pause(PREPARED_S)
        try:
            clients += case.clients(server)
            _wait_until_all_are_taken(server, case)
            wait_for(lambda: all(client.begun() for client in clients), "clients that are where they should be")
            stop = _stop(server, clients, case)
        finally:
            close_all(clients)
        print(json.dumps({"case": case.name, "round": number, **stop}))
        log = server.log.read_text(errors="replace")
        assert set(stop["got"]) <= {FINISHED, TOLD, TOLD_IN_WORDS}, log[-4000:]
        assert "Signal (11)" not in log
        assert stop["status"] == 0 or (case.held and stop["status"] == 1 and DRAINED in log), log[-4000:]
        assert not stop["left"]


def _stop(server: TritonServer, clients: list[Any], case: Case) -> dict[str, Any]:
    """Tell the server to end; return what was seen."""
    parts = [process for process in server.members() if process.pid != server.pid]
    engine = [process for process in parts if name_of(process).startswith("VLLM::")]
    child = server._child
    assert parts
    assert child is not None
    os.kill(server.pid, signal.SIGTERM)
    began = now()
    got = Counter(client.got() for client in clients if hasattr(client, "got"))
    told = now() - began
    _wait_for_end(engine, "the engine")
    gone = {"told_s": round(told, 1), "engine_s": round(now() - began, 1)}
    if case.stays:
        close_all(clients)  # stock Triton waits for them
    _wait_for_end(parts, "the stubs")
    gone["stubs_s"] = round(now() - began, 1)
    wait_for(lambda: child.poll() is not None, lambda: f"the server's end\n{server.log.read_text(errors='replace')[-4000:]}")
    gone["server_s"] = round(now() - began, 1)
    log = server.log.read_text(errors="replace")
    return {
        "got": dict(got),
        **gone,
        "status": child.returncode,
        "left": [name_of(process) for process in server.members()],
        "regions": len(list(Path("/dev/shm").glob(f"{server._shared_memory_prefix}*"))),
        "said": re.findall(r"\d+ requests in flight have.*|Exit timeout.*|Signal \(.*|failed to.*", log),
        "last": log.splitlines()[-4:],
    }


def _wait_for_end(processes: list[Process], what: str) -> None:
    wait_for(lambda: not any(is_alive(process) for process in processes), f"the end of {what}", longest_pause=0.05)


def _wait_until_all_are_taken(server: TritonServer, case: Case) -> None:
    """Return when the model has them all; one that comes while the server ends may find its connection closed."""
    names = ["nv_inference_request_success"]  # counted when the model has taken a request
    if case.openai:  # some may have ended
        names = ["vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:request_success_total"]

    def taken() -> float:
        page = read_metrics(f"http://127.0.0.1:{server.ports.metrics}/metrics")
        return sum(page.total(name) for name in names)

    wait_for(lambda: taken() >= case.readers, lambda: f"{case.readers} requests: the model has had {taken():.0f}")
