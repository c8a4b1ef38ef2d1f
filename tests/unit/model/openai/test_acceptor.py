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


async def end(client):
    """Return when the server has closed the connection."""
    with contextlib.suppress(ConnectionError):
        assert await client[0].read(1) == b""


async def echoes(client):
    """Return whether the connection is served."""
    client[1].write(b"x")
    return await client[0].read(1) == b"x"


async def test_connections_above_the_limit_are_closed():
    """The next one is taken when one has ended."""
    place = Place()
    clients = [await place.connect() for _ in range(MOST)]
    assert [await echoes(client) for client in clients] == [True] * MOST
    await end(await place.connect())
    clients[0][1].close()
    await until(lambda: len(place.connections) < MOST)
    assert await echoes(await place.connect())
    await place.close()


async def test_handshakes_count(monkeypatch):
    """The next connection is taken when a client that has begun no handshake has left."""
    monkeypatch.setattr(acceptor, "HEAD_S", 600)
    place = Place(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    silent = [await place.connect() for _ in range(MOST)]
    await end(await place.connect())
    assert len(place.acceptor.sockets) == 1 + MOST
    assert place.connections == set()
    silent[0][1].close()
    await until(lambda: len(place.acceptor.sockets) == MOST)
    await place.connect()
    await until(lambda: len(place.acceptor.sockets) == 1 + MOST)
    await place.close()


async def test_a_client_that_begins_no_handshake_is_cut_off(monkeypatch):
    """Otherwise it would keep its place for ever."""
    monkeypatch.setattr(acceptor, "HEAD_S", 0.01)
    place = Place(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    silent = await place.connect()
    await end(silent)
    await until(lambda: len(place.acceptor.sockets) == 1)
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


async def test_the_port_is_closed_in_the_end(monkeypatch):
    """Handshakes end with it, and not by their own limit."""
    monkeypatch.setattr(acceptor, "HEAD_S", 600)
    place = Place(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    silent = await place.connect()
    await until(lambda: len(place.acceptor.sockets) > 1)
    address = place.listening.getsockname()
    place.accepting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await place.accepting
    await asyncio.wait_for(end(silent), 60)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
    await place.close()
