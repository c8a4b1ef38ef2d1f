"""A model notices that the server's HTTP endpoint refuses new connections; real sockets, and this process as the server."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from triton_vllm.startup import endpoint as module
from triton_vllm.startup.endpoint import (
    EAGER_SEARCH_S,
    REFUSALS_OF_CLOSING,
    SEARCH_PERIOD_S,
    HttpEndpoint,
    is_answered,
    listening,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


class Server:
    """Answers each connection in the way that a test sets."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.address = listener.getsockname()[:2]
        self.answer: bytes | None = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self) -> None:
        """Answer until the listener is shut down."""
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with connection:
                if self.answer is None:  # it is too busy
                    connection.recv(1000)
                    connection.recv(1000)
                elif self.answer:
                    connection.recv(1000)
                    connection.sendall(self.answer)
                # Otherwise it is closed at once, which resets it if the question has come.


@contextmanager
def serving(host: str = "127.0.0.1") -> Iterator[Server]:
    """Yield a server of this process."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        server = Server(listener)
        try:
            yield server
        finally:
            with suppress(OSError):  # the test has closed it
                listener.shutdown(socket.SHUT_RDWR)
            server.thread.join()


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for an answer as long as it takes: this machine may be busy."""
    monkeypatch.setattr(module, "ANSWER_TIMEOUT_S", 60.0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def server() -> Iterator[Server]:
    """A server that answers."""
    with serving() as one:
        yield one


@pytest.mark.parametrize(("host", "seen"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "::1"), ("::", "::1")])
def test_the_addresses_of_a_process_are_found(host, seen):
    """As the kernel lists them; those on all interfaces are asked on the loopback interface."""
    try:
        context = serving(host)
        with context as server:
            assert (seen, server.address[1]) in listening(os.getpid())
            assert (seen, server.address[1]) not in listening(os.getppid())
    except OSError:
        pytest.skip(f"this machine has no {host}")


def test_an_answer_a_refusal_and_silence_differ(server, monkeypatch):
    """Only HTTP counts as an answer: the gRPC endpoint speaks another protocol."""
    assert is_answered(server.address) is True
    server.answer = b"\x00\x00\x18\x04"
    assert is_answered(server.address) is False
    server.answer = b""
    assert is_answered(server.address) is False
    server.answer = None
    monkeypatch.setattr(module, "ANSWER_TIMEOUT_S", 0.1)
    assert is_answered(server.address) is None


def test_an_endpoint_that_has_answered_and_refuses_is_closing(server, monkeypatch):
    """Twice; an answer in between begins anew, and one that is late says nothing."""
    endpoint = HttpEndpoint(os.getpid())
    assert not endpoint.is_closing()
    usual = server.answer
    for answer in (b"", usual, b""):
        server.answer = answer
        assert not endpoint.is_closing()
    server.answer = None
    with monkeypatch.context() as soon:
        soon.setattr(module, "ANSWER_TIMEOUT_S", 0.1)
        assert not endpoint.is_closing()
    server.answer = b""
    assert endpoint.is_closing()
    for _ in range(REFUSALS_OF_CLOSING - 1):
        assert endpoint.is_closing()


@contextmanager
def joined(server: Server) -> Iterator[None]:
    """Let another socket listen on a server's port, as with --reuse-http-port."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(server.address)
        other.listen()
        assert listening(os.getpid()).count(server.address) == 2
        yield


def test_a_port_that_other_servers_share_is_not_asked(server):
    """The kernel may give a connection to one that ends."""
    with joined(server):
        endpoint = HttpEndpoint(os.getpid())
        assert not endpoint.is_closing()
        assert server.address not in endpoint._refusals


def test_refusals_of_a_port_that_others_have_joined_say_nothing(server, monkeypatch):
    """One of the others may be ending. This process may also serve other ports, for other tests."""
    endpoint = HttpEndpoint(os.getpid())
    assert not endpoint.is_closing()
    with joined(server), serving():
        monkeypatch.setattr(module, "is_answered", lambda address: address != server.address)
        for _ in range(2 * REFUSALS_OF_CLOSING):
            assert not endpoint.is_closing()
    assert not endpoint.is_closing()
    assert endpoint.is_closing()


@pytest.fixture
def as_tritonserver() -> Iterator[None]:
    """Give this process the server's name."""
    comm = Path("/proc/self/comm")
    before = comm.read_text()
    comm.write_text("tritonserver")
    yield
    comm.write_text(before)


@pytest.mark.usefixtures("as_tritonserver")
def test_an_endpoint_that_is_gone_has_closed():
    """Triton of 2025 and later ends it before it waits for the clients of gRPC, and tells the core nothing meanwhile."""
    endpoint = HttpEndpoint(os.getpid())
    with serving(), serving() as http:
        assert not endpoint.is_closing()
        http.listener.shutdown(socket.SHUT_RDWR)
        http.thread.join()
        http.listener.close()
        for _ in range(REFUSALS_OF_CLOSING - 1):
            assert not endpoint.is_closing()
        assert endpoint.is_closing()


def test_a_program_that_embeds_triton_may_end_its_endpoint_and_go_on():
    """Only tritonserver is known to end it at its own end."""
    endpoint = HttpEndpoint(os.getpid())
    with serving() as http:
        assert not endpoint.is_closing()
        http.listener.shutdown(socket.SHUT_RDWR)
        http.thread.join()
        http.listener.close()
        for _ in range(2 * REFUSALS_OF_CLOSING):
            assert not endpoint.is_closing()


@pytest.mark.usefixtures("as_tritonserver")
def test_an_endpoint_that_is_too_busy_is_not_gone(server, monkeypatch):
    """Its connections wait to be taken."""
    endpoint = HttpEndpoint(os.getpid())
    assert not endpoint.is_closing()
    monkeypatch.setattr(module, "is_answered", lambda _: None)
    for _ in range(2 * REFUSALS_OF_CLOSING):
        assert not endpoint.is_closing()


def test_the_endpoint_is_searched_until_it_is_there():
    """At each look in the first minute, as the server may load other models first. Then now and then: it may have none."""
    clock = Clock()
    endpoint = HttpEndpoint(os.getpid(), clock)
    with serving() as late:
        assert endpoint.find()
        assert late.address in endpoint._refusals
    endpoint = HttpEndpoint(2**22 + 1, clock)
    assert not endpoint.find()
    assert not endpoint.is_closing()
    endpoint._server = os.getpid()
    with serving() as late:
        clock.now = EAGER_SEARCH_S
        assert endpoint.find()
        assert late.address in endpoint._refusals
    endpoint = HttpEndpoint(2**22 + 1, clock)
    assert not endpoint.find()
    clock.now += EAGER_SEARCH_S
    assert not endpoint.find()
    endpoint._server = os.getpid()
    with serving() as late:
        clock.now += SEARCH_PERIOD_S - 1
        assert not endpoint.find()
        assert endpoint._refusals == {}
        clock.now += 1
        assert endpoint.find()
        assert late.address in endpoint._refusals
