"""The corpus through the OpenAI port of a real server whose memory is capped, next to neighbours on both APIs."""

from __future__ import annotations

import http.client
import json
import re
import resource
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psutil
import pytest

from hostile.openai_corpus import ANSWERED, BYTES, CHAT, JSON_TYPE, RESPONSES, SHOTS, TEXT, Bytes, Shot, head
from hostile.openai_items import INCOMPLETE, TAKEN
from hostile.openai_taken import TAKEN_NOW, naming
from support import models, openai_routes
from support.clock import now
from support.leftovers import name_of
from support.model_requests import ask
from support.neighbours import neighbours
from support.patience import pause
from support.reference import ONE_THREAD
from support.settings import openai_url, with_openai, with_parameter
from support.slowness import slowness_now
from support.triton_client import get, post
from triton_vllm.openai.fields import ROUTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from support.neighbours import Neighbour
    from support.serving import Parts, Serve
    from vllm_env.serve.server import TritonServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
PROMPT = "The capital of France is"
INTERNALS = re.compile(r"Traceback|NoneType|object at 0x|\.py\b|site-packages|triton_vllm|<class|KeyError|/root")
LONGEST_ERROR = 2000
REPLY_SECONDS = 300.0
MORE_MEMORY = 2 << 30
LONGER_SECONDS = 1.0
GROUP = 8
AT_ONCE = 4
TRIES = 3
ORDINARY = [
    (TEXT, {"prompt": PROMPT, "max_tokens": 8}),
    (CHAT, {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}),
    (CHAT, {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8, "structured_outputs": {"regex": "a+"}}),
    (RESPONSES, {"input": "Hello!", "max_output_tokens": 8}),
]


@pytest.fixture(scope="module")
def capped(serving: Serve, parts: Parts) -> Iterator[TritonServer]:
    """A warm server whose stub and engine may take 2 GB more than they have."""
    engine = {"model": str(models.chat(parts.environment)), "max_num_batched_tokens": 48, "max_num_seqs": 16}
    engine |= {"max_model_len": 256, "reasoning_parser": "deepseek_r1", "tool_parser": "hermes"}

    def prepare(model: Path) -> None:
        with_openai(model)
        with_parameter(model, "MAX_N", "128")  # for what is refused only because of its size

    with serving(engine, environment=ONE_THREAD, prepare=prepare) as server:
        for path, body in ORDINARY * 2:
            status, text = post(openai_url(server), path, {"model": "vllm", **body}, timeout=REPLY_SECONDS)
            assert status == ANSWERED, text
        assert not ask(server, PROMPT).error
        for process in lasting(server):
            used = re.search(r"VmData:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
            assert used
            most = int(used[1]) * 1024 + MORE_MEMORY
            resource.prlimit(process.pid, resource.RLIMIT_DATA, (most, most))
        yield server


def lasting(server: TritonServer) -> list[psutil.Process]:
    """Return the stub and EngineCore."""
    return [one for one in server.members() if name_of(one).startswith(("triton_python_b", "VLLM::EngineCor"))]


def send(url: str, shot: Shot) -> tuple[int, str]:
    """Send a request; return the status and the text of the answer."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=REPLY_SECONDS)
    try:
        connection.request("POST", shot.path, shot.make(), dict(shot.headers))
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def fault(url: str, shot: Shot) -> str:
    """Send a request; return what is wrong with its answer, or nothing."""
    try:
        status, text = send(url, shot)
    except (OSError, http.client.HTTPException) as error:
        return f"{shot.name}: {error!r}"
    return judged(shot, status, text)


def judged(shot: Shot, status: int, text: str) -> str:
    """Return what is wrong with an answer, or nothing."""
    what = f"{shot.name}: {status} {text[:300]!r}"
    if status == ANSWERED and shot.may_pass:
        return ""
    if status != (shot.status or status) or not 400 <= status < 500:
        return what
    # vLLM has no such path for this model.
    if (status, text) == (404, '{"detail":"Not Found"}'):
        return ""
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"no error object: {what}"
    if shot.says not in message if shot.says else not names(shot, message):
        return f"the message names nothing: {what}"
    if len(text) > LONGEST_ERROR:
        return f"{len(text)} characters: {what}"
    return f"internals: {what}" if INTERNALS.search(text) else ""


def names(shot: Shot, message: str) -> bool:
    """Return whether a message has a name of the body, or what the body is."""
    try:
        body = json.loads(shot.make())
    except (ValueError, RecursionError):
        body = {}
    found = {"the body", "Media Type", "prompt", "pictures", "model"}
    waiting = [body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            found |= node.keys()
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node[:100]
    return any(re.search(rf"(?<!\w){re.escape(name[:50])}", message) for name in found if name)


def ordinary(url: str, number: int) -> str:
    """Send a request as every client does."""
    path, body = ORDINARY[number % len(ORDINARY)]
    status, text = post(url, path, {"model": "vllm", **body}, timeout=REPLY_SECONDS)
    return "" if status == ANSWERED else f"an ordinary request: {status} {text[:300]}"


class Field:
    """A server, its neighbours, and what they saw."""

    def __init__(self, server: TritonServer) -> None:
        self.url = openai_url(server)
        self.neighbours: Sequence[Neighbour] = neighbours(server, PROMPT)
        self.faults: list[str] = []
        self.waits: list[tuple[float, float]] = []
        self.names: dict[float, list[str]] = {}

    def excess(self, shots: Sequence[Shot]) -> float:
        """Send requests; return how much longer a neighbour waited than next to as many ordinary ones.

        In seconds of a machine that has no other work.
        """
        slowness = slowness_now()
        usual = self._longest([lambda number=number: ordinary(self.url, number) for number in range(len(shots))])
        hostile = self._longest([lambda shot=shot: fault(self.url, shot) for shot in shots])
        self.waits.append((usual, hostile))
        self.names[hostile] = [shot.name for shot in shots]
        return (hostile - usual) / max(slowness, slowness_now())

    def _longest(self, calls: Sequence[Any]) -> float:
        began = now()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            self.faults += [found for found in pool.map(lambda call: call(), calls) if found]
        ended = now()
        return max(one.longest(began, ended) for one in self.neighbours)


def test_the_corpus_harms_nobody(capped: TritonServer) -> None:
    """Each is refused by name or answered; both neighbours finish, and wait no longer than next to ordinary requests."""
    before = {process.pid for process in lasting(capped)}
    field = Field(capped)
    for one in field.neighbours:
        one.start()
    slow: list[str] = []
    shots = [*TAKEN_NOW, *SHOTS]
    groups = [shots[start : start + GROUP] for start in range(0, len(shots), GROUP)]
    for group in groups:
        # The machine may be busy for a moment. A request that stops the loop does it each time.
        found = [field.excess(group)]
        while found[0] > LONGER_SECONDS and len(found) < TRIES:
            found.append(field.excess(group))
        if median(found) > LONGER_SECONDS:
            slow.append(f"{[round(one, 1) for one in found]} s: {[shot.name for shot in group]}")
    for one in field.neighbours:
        one.stop()
    usual, hostile = zip(*field.waits, strict=True)
    print(f"{len(shots)} requests; the longest waits of a neighbour in {len(field.waits)} rounds, s:")
    for name, waits in (("ordinary", usual), ("hostile", hostile)):
        print(f"  {name}: median {median(waits):.2f}, from {min(waits):.2f} to {max(waits):.2f}")
    print(*(f"  {wait:.2f} s: {field.names[wait]}" for wait in sorted(field.names)[-3:]), sep="\n")
    print(f"answers of the neighbours: {[one.answers for one in field.neighbours]}")
    print(*sorted(set(field.faults)), sep="\n")
    assert [one.errors for one in field.neighbours] == [[], []]
    assert {process.pid for process in lasting(capped)} == before
    assert sorted(set(field.faults)) == []
    assert slow == []
    assert get(field.url, "/health")[0] == ANSWERED
    assert "starting it again" not in capped.log.read_text(errors="replace")


def test_no_request_reaches_a_network(capped: TritonServer) -> None:
    """Whatever names the address of a server: nobody connects to it."""
    url = openai_url(capped)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.5)
        place = f"http://127.0.0.1:{server.getsockname()[1]}/x"
        sent = [*naming(place)]
        statuses = [post(url, path, {"model": "vllm", **body}, timeout=REPLY_SECONDS)[0] for path, body in sent]
        with pytest.raises(TimeoutError):
            server.accept()
    assert len(sent) > 50
    assert {*statuses} == {ANSWERED, 400}


def answers(url: str, sent: Bytes) -> tuple[set[int], bool]:
    """Write bytes to a socket; return the statuses of the answers, and whether the server closed the connection."""
    place = (urlsplit(url).hostname, urlsplit(url).port)
    with socket.create_connection(place, timeout=REPLY_SECONDS) as client:
        got: list[bytes] = []

        def read() -> None:
            try:
                got.extend(iter(lambda: client.recv(1 << 16), b""))
            except OSError:
                return

        reader = threading.Thread(target=read)
        reader.start()
        try:
            client.sendall(sent.sent)
            if sent.shuts:
                client.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        reader.join(REPLY_SECONDS)
        return {int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", b"".join(got))}, not reader.is_alive()


@pytest.mark.parametrize("sent", BYTES, ids=lambda sent: sent.name)
def test_what_is_hardly_http(capped: TritonServer, sent: Bytes) -> None:
    """It is answered, or was not complete; the connection is closed, and the next one is served."""
    url = openai_url(capped)
    statuses, closed = answers(url, sent)
    assert closed
    assert statuses <= sent.statuses
    assert bool(statuses) == bool(sent.statuses)
    assert get(url, "/health")[0] == ANSWERED


def test_bodies_that_never_end(capped: TritonServer) -> None:
    """One that stops is refused after a minute, one that goes on when it is too large; nobody waits for them."""
    url = openai_url(capped)
    place = (str(urlsplit(url).hostname), urlsplit(url).port or 0)
    start = head("POST", TEXT, "Transfer-Encoding: chunked") + b"5\r\n" + b"     " + b"\r\n"
    with ThreadPoolExecutor(16) as pool:
        stopped = [pool.submit(answers, url, Bytes("", start)) for _ in range(8)]
        endless = [pool.submit(_flood, place, start) for _ in range(4)]
        while not (all(one.done() for one in stopped) and all(one.done() for one in endless)):
            assert post(url, TEXT, {"model": "vllm", "prompt": "x", "max_tokens": 1}, timeout=REPLY_SECONDS)[0] == ANSWERED
            pause(1)
    assert [one.result() for one in stopped] == [({408}, True)] * 8
    assert [one.result() for one in endless] == [413] * 4


def _flood(place: tuple[str, int], start: bytes) -> int:
    """Send chunks until there is an answer; return its status."""
    chunk = b"10000\r\n" + b" " * 65_536 + b"\r\n"
    with socket.create_connection(place, timeout=REPLY_SECONDS) as client:
        client.sendall(start)
        found: list[bytes] = []
        reader = threading.Thread(target=lambda: found.append(client.recv(1 << 16)))
        reader.start()
        for _ in range(100 * 16):
            if found:
                break
            client.sendall(chunk)
        reader.join(REPLY_SECONDS)
        (status,) = re.findall(rb"HTTP/1\.1 (\d+) ", found[0])
        return int(status)


def test_only_the_listed_paths_answer(capped: TritonServer, parts: Parts) -> None:
    """Of all routes that vLLM's application has, with every method; test_model_openai.py reads its sources, too."""
    url = openai_url(capped)
    program = Path(openai_routes.__file__)
    argv = [str(parts.environment / "bin" / "python"), str(program), str(capped.repository / "vllm" / "1")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {re.sub(r"{\w+}", "x", path) for path in json.loads(done.stdout.splitlines()[-1])["paths"]}
    assert len(found) > 50
    assert found >= {"/v1/chat/completions", "/metrics", "/collective_rpc", "/v1/realtime", "/openapi.json"}
    statuses = {(path, method): _status(url, method, path) for path in found | ROUTES.keys() for method in METHODS}
    listed = {(path, route.method) for path, route in ROUTES.items()}
    answered = {asked for asked, status in statuses.items() if status not in (404, 405)}
    # A browser asks so before it sends a request. For a listed path, vLLM's answer is as good as none.
    assert {asked for asked in answered - listed if not (asked[1] == "OPTIONS" and asked[0] in ROUTES)} == set()
    # The paths for pooling are not those of a model that generates.
    pooling = {path for path in ROUTES if "score" in path or "rerank" in path or "embed" in path}
    assert {path for path, _ in listed - answered} == pooling
    print(f"{len(found)} routes of vLLM's application; {len(listed)} are listed")


METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")


def _status(url: str, method: str, path: str) -> int:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=REPLY_SECONDS)
    try:
        connection.request(method, path, b"{}" if method == "POST" else None, JSON_TYPE)
        return connection.getresponse().status
    finally:
        connection.close()


def test_usual_items_are_taken_by_vllm(capped: TritonServer) -> None:
    """In any number: it makes no error for those that the port lets through."""
    url = openai_url(capped)
    for item in (*TAKEN, *INCOMPLETE):
        body = {"model": "vllm", "input": [item, TAKEN[0]], "max_output_tokens": 1}
        status, text = post(url, RESPONSES, body, timeout=REPLY_SECONDS)
        assert status == ANSWERED or "validation error" not in text, (item, text)
