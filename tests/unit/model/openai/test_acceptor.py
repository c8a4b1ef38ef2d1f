"""Real connections in a real event loop; the protocols only note what they get."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from typing import Any

import pytest

from triton_vllm.openai import acceptor
from triton_vllm.openai.acceptor import Acceptor

MOST = 3


class Protocol(asyncio.Protocol):
    """Notes its connection."""

    def __init__(self, connections):
        self.connections = connections

    def connection_made(self, transport):
        self.connections.add(self)
        self.transport = transport

    def connection_lost(self, exc):
        self.connections.discard(self)

    def data_received(self, data):
        self.transport.write(data)


class Place:
    """A port that is served."""

    def __init__(self, tls=None):
        self.connections: set[Any] = set()
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.acceptor = Acceptor(self.listening, lambda: Protocol(self.connections), tls, self.connections, MOST)
        self.accepting = asyncio.ensure_future(self.acceptor.run())
        self.clients: list[Any] = []

    async def connect(self):
        """Return a client's reader and writer."""
        self.clients.append(await asyncio.open_connection(*self.listening.getsockname()))
        return self.clients[-1]

    async def close(self):
        """End all."""
        self.accepting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.accepting
        for _, writer in self.clients:
            writer.close()
        for one in [*self.connections]:
            one.transport.abort()
        await asyncio.sleep(0)


async def until(condition):
    """Return when it is true."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def is_ended(client):
    """Return whether the server has closed the connection."""
    with contextlib.suppress(asyncio.TimeoutError, ConnectionError):
        return await asyncio.wait_for(client[0].read(1), 0.2) == b""
    return False


async def echoes(client):
    """Return whether the connection is served."""
    client[1].write(b"x")
    return await asyncio.wait_for(client[0].read(1), 10) == b"x"


async def test_connections_above_the_limit_are_closed():
    """The next one is taken when one has ended."""
    place = Place()
    clients = [await place.connect() for _ in range(MOST)]
    assert [await echoes(client) for client in clients] == [True] * MOST
    assert await is_ended(await place.connect())
    clients[0][1].close()
    await until(lambda: len(place.connections) < MOST)
    assert await echoes(await place.connect())
    await place.close()


async def test_handshakes_count(monkeypatch):
    """A client that begins none keeps its place for a while only."""
    monkeypatch.setattr(acceptor, "HEAD_S", 0.5)
    place = Place(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    silent = [await place.connect() for _ in range(MOST)]
    assert await is_ended(await place.connect())
    assert not await is_ended(silent[0])
    assert len(place.acceptor.sockets) == 1 + MOST
    assert place.connections == set()
    await until(lambda: len(place.acceptor.sockets) == 1)
    assert await is_ended(silent[0])
    late = await place.connect()
    assert not await is_ended(late)
    await place.close()


async def test_a_machine_without_files_takes_connections_later(monkeypatch):
    """The port stays open."""
    monkeypatch.setattr(acceptor, "PAUSE_S", 0.01)
    loop = asyncio.get_running_loop()
    accept = loop.sock_accept
    failures = [OSError(24, "Too many open files"), ConnectionAbortedError()]

    async def failing(listening):
        if failures:
            raise failures.pop()
        return await accept(listening)

    monkeypatch.setattr(loop, "sock_accept", failing)
    place = Place()
    assert await echoes(await place.connect())
    assert failures == []
    await place.close()


async def test_the_port_is_closed_in_the_end():
    """Handshakes end with it."""
    place = Place(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    silent = await place.connect()
    await until(lambda: len(place.acceptor.sockets) > 1)
    address = place.listening.getsockname()
    place.accepting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await place.accepting
    assert await is_ended(silent)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
    await place.close()
