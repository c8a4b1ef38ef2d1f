"""Take the port's connections, as many as are allowed."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from triton_vllm.openai.connection import HEAD_S

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable, Collection

PAUSE_S = 0.5
"""How long to take no connection when there is no file for it, s."""


class Acceptor:
    """Gives each connection to a protocol.

    asyncio's own server says nothing about a TLS connection before the end of its handshake. So a
    client could open any number of them.

    Args:
        listening: the socket of the port.
        protocol: makes a connection's protocol.
        tls: the TLS configuration. None without TLS.
        connections: the protocols of the open connections.
        most: the most connections, with those that are in their handshake.
    """

    def __init__(
        self,
        listening: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None,
        connections: Collection[Any],
        most: int,
    ) -> None:
        self._listening = listening
        self._protocol = protocol
        # The loop's arguments. Without TLS it takes no timeout.
        self._tls: dict[str, Any] = {"ssl": tls, "ssl_handshake_timeout": HEAD_S} if tls else {}
        self._connections = connections
        self._most = most
        # Connections in their handshake, and the tasks that wait for its end.
        self._opening: dict[asyncio.Task[None], socket.socket] = {}

    @property
    def sockets(self) -> list[socket.socket]:
        """The port, and the connections that have no protocol yet."""
        return [self._listening, *self._opening.values()]

    async def run(self) -> None:
        """Take connections until this is cancelled; then close the port."""
        loop = asyncio.get_running_loop()
        self._listening.setblocking(False)  # noqa: FBT003 - the socket's own
        try:
            while True:
                try:
                    taken, _ = await loop.sock_accept(self._listening)
                # The client has left already.
                except ConnectionError:
                    continue
                # For example, this process has as many open files as it may have.
                except OSError:
                    await asyncio.sleep(PAUSE_S)
                    continue
                if len(self._connections) + len(self._opening) >= self._most:
                    taken.close()
                    continue
                opening = loop.create_task(self._open(taken))
                self._opening[opening] = taken
                opening.add_done_callback(self._opening.pop)
        finally:
            for opening in self._opening:
                opening.cancel()
            self._listening.close()

    async def _open(self, taken: socket.socket) -> None:
        """Give a connection to a new protocol, after the TLS handshake if there is one."""
        loop = asyncio.get_running_loop()
        # A handshake that fails, or takes too long. The loop closes the socket.
        with suppress(OSError, asyncio.TimeoutError):
            await loop.connect_accepted_socket(self._protocol, taken, **self._tls)
