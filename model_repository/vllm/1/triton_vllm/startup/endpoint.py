"""Notice that the server stops its HTTP endpoint.

A server that ends stops its endpoints first. The HTTP endpoint then waits for its clients, for up
to ``--exit-timeout-secs``. Triton's core knows nothing of it meanwhile, so it cannot tell a model.
But the endpoint closes each new connection without an answer (seen with 24.10).

Newer releases then also wait for the clients of the gRPC endpoint (server's src/main.cc,
StopEndpoints). By then the HTTP endpoint is gone, and nothing listens on its port.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Address = tuple[str, int]
# A client of a busy server waits longer. Then this look finds nothing out.
ANSWER_TIMEOUT_S = 0.2
# A server without an HTTP endpoint is searched again and again.
SEARCH_PERIOD_S = 10.0
# At first more often: the server opens its ports when all models of its start are loaded.
EAGER_SEARCH_S = 60.0
# Once could be an accident of the network.
REFUSALS_OF_CLOSING = 2
# A program that embeds Triton may stop its HTTP endpoint and go on.
_SERVER_PROGRAM = "tritonserver"
_LISTENING_STATE = "0A"
_LIVE_REQUEST = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


class HttpEndpoint:
    """The HTTP endpoint of the server that started this process.

    Args:
        server: the server's process id.
        clock: returns seconds.
    """

    def __init__(self, server: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._server = server
        self._clock = clock
        # The refusals of each address, since its last answer.
        self._refusals: dict[Address, int] = {}
        # Seconds of the clock: when to search again, and until when to search more often. The
        # second one is set by the first search.
        self._next_search = 0.0
        self._eager_until: float | None = None
        # Whether the endpoint has been found.
        self._is_complete = False

    def find(self) -> bool:
        """Return whether the endpoint has been found; otherwise search it."""
        # A request may come a moment before the end of the server. It is then too late to find an
        # endpoint that answers.
        if not self._is_complete:
            self._search()
        return self._is_complete

    def is_closing(self) -> bool:
        """Return whether the endpoint has answered before and now refuses; asks it once."""
        self.find()
        listened_on = listening(self._server)
        for address in self._refusals:
            answer = is_answered(address)
            if answer:
                self._refusals[address] = 0
                continue
            if answer is None:
                # An answer that has not come in time says nothing, but a closed port does.
                refuses = self._is_standalone() and is_gone(address)
            else:
                # Not if another server shares the port, or has taken it from an endpoint that is
                # gone: this may be its refusal.
                refuses = listened_on.count(address) == 1
            if refuses:
                self._refusals[address] += 1
        return any(refusals >= REFUSALS_OF_CLOSING for refusals in self._refusals.values())

    def _is_standalone(self) -> bool:
        return _lines(Path(f"/proc/{self._server}/comm")) == [_SERVER_PROGRAM]

    def _search(self) -> None:
        """Ask each port of the server; note those that answer in HTTP, and when to search again.

        The search is complete if one has answered so, and none was too slow to answer.
        """
        now = self._clock()
        if self._eager_until is None:
            self._eager_until = now + EAGER_SEARCH_S
        if now < self._next_search:
            return
        addresses = listening(self._server)
        # With --reuse-http-port several servers share a port, and one that ends would refuse
        # connections that this server might have answered.
        own = [address for address in addresses if addresses.count(address) == 1]
        answers = {address: is_answered(address) for address in own}
        for address, answer in answers.items():
            if answer:
                self._refusals.setdefault(address, 0)
        all_known = None not in answers.values()
        self._is_complete = bool(self._refusals) and all_known
        # A busy endpoint may not answer in time. It is asked again at the next look, because a
        # server that ends before it has been found cuts its clients off.
        may_wait = all_known and now >= self._eager_until
        self._next_search = self._clock() + (SEARCH_PERIOD_S if may_wait else 0)


def is_answered(address: Address) -> bool | None:
    """Return whether a server answers in HTTP; None if that was not found out in time.

    False means that it has taken the connection and closed it without an answer.
    """
    try:
        with socket.create_connection(address, ANSWER_TIMEOUT_S) as connection:
            connection.sendall(_LIVE_REQUEST)
            answer = connection.recv(16)
    except (ConnectionResetError, BrokenPipeError):
        return False
    # For example, nothing listens there any more, or the time is over.
    except OSError:
        return None
    # The gRPC endpoint answers in another protocol.
    return answer.startswith(b"HTTP/") if answer else False


def is_gone(address: Address) -> bool:
    """Return whether no process listens there any more."""
    try:
        with socket.create_connection(address, ANSWER_TIMEOUT_S):
            return False
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)


def listening(process: int) -> list[Address]:
    """Return the TCP addresses on which a process listens, as this machine can reach them.

    The list is empty if the kernel does not say. An address on which other processes listen as well
    is in the list more than once.
    """
    own = set(_sockets(process))
    # The sockets that listen on each address, by their inodes, of any process.
    inodes: dict[Address, list[str]] = {}
    for name in ("tcp", "tcp6"):
        for line in _lines(Path(f"/proc/{process}/net/{name}")):
            fields = line.split()
            # proc_net(5): local address, remote address, state, …, inode
            if len(fields) > 9 and fields[3] == _LISTENING_STATE:
                inodes.setdefault(_address(fields[1]), []).append(fields[9])
    addresses: list[Address] = []
    for address, sockets in inodes.items():
        if own & set(sockets):
            # once for each socket
            addresses += [address] * len(sockets)
    return addresses


def _sockets(process: int) -> Iterator[str]:
    """Yield the inodes of a process's sockets."""
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            # The descriptor may be closed at any moment.
            with contextlib.suppress(OSError):
                kind, _, inode = str(descriptor.readlink()).partition(":[")
                if kind == "socket":
                    yield inode.rstrip("]")


def _address(text: str) -> Address:
    """Return an address that the kernel writes as ``0100007F:1F90``."""
    digits, _, port = text.partition(":")
    # Each group of four bytes is a number in the order of this processor.
    groups = [int(digits[start : start + 8], 16) for start in range(0, len(digits), 8)]
    packed = struct.pack(f"={len(groups)}I", *groups)
    family = socket.AF_INET if len(groups) == 1 else socket.AF_INET6
    host = socket.inet_ntop(family, packed)
    # A server on all interfaces is reached on this one.
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    return reachable, int(port, 16)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
