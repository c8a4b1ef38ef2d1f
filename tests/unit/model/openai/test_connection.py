"""What a connection may cost before its request is known, with a stand-in for uvicorn's protocol and a real event loop.

tests/e2e/test_model_openai.py has uvicorn's own protocol.
"""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from triton_vllm.base.errors import ConfigError
from triton_vllm.openai import connection
from triton_vllm.openai.connection import MOST_OVERHEAD, MOST_WAITING, Bounds


class Protocol:
    """In place of uvicorn's: what is in `heads` ends a head, and the rest is body."""

    def __init__(self):
        self.loop = asyncio.get_running_loop()
        self.pipeline: list[Any] = []
        self.cycle: Any = None
        self.begun = 0
        self.refused = ""

    def connection_made(self, transport):
        self.transport = transport

    def connection_lost(self, exc):
        pass

    def data_received(self, data):
        if data == b"head":
            self.on_headers_complete()
        elif self.cycle is not None:
            self.on_body(data)

    def on_headers_complete(self):
        self.begun += 1
        self.cycle = SimpleNamespace(response_started=False, response_complete=False)

    def on_body(self, body):
        pass

    def on_message_complete(self):
        pass

    def send_400_response(self, text):
        self.refused = text
        self.transport.close()

    def pause_writing(self):
        pass

    def resume_writing(self):
        pass


class Bounded(Bounds, Protocol):
    """As `bounded` makes it."""


class Transport:
    """Notes its end."""

    aborted = False

    closed = False

    def abort(self):
        self.aborted = True

    def close(self):
        self.closed = True

    def is_closing(self):
        return self.closed


def connect():
    """Return a new connection."""
    made = Bounded()
    made.connection_made(Transport())
    return made


async def test_a_head_that_does_not_arrive_ends_the_connection(monkeypatch):
    """Also the one after an answer; a request that is being answered may take any time."""
    monkeypatch.setattr(connection, "HEAD_S", 0.02)
    silent, asking, slow = connect(), connect(), connect()
    asking.data_received(b"head")
    slow.data_received(b"head")
    slow.cycle.response_complete = True
    slow.data_received(b"he")
    await asyncio.sleep(0.2)
    assert (silent.transport.aborted, asking.transport.aborted, slow.transport.aborted) == (True, False, True)
    lost = connect()
    lost.connection_lost(None)
    await asyncio.sleep(0.2)
    assert not lost.transport.aborted


async def test_what_is_no_body_is_bounded():
    """Of a request; a body of any length is not."""
    client = connect()
    client.data_received(b"h" * MOST_OVERHEAD)
    assert not client.refused
    client.data_received(b"h")
    assert client.refused == f"more than {MOST_OVERHEAD} bytes of the request are not its body"
    assert client.transport.closed
    client.data_received(b"h")  # while the answer is written
    client = connect()
    client.data_received(b"head")
    for _ in range(100):
        client.data_received(b"b" * MOST_OVERHEAD)
    assert not client.refused
    client.connection_lost(None)


@pytest.mark.parametrize("is_complete", [False, True])
async def test_a_refusal_does_not_go_into_another_answer(is_complete):
    """The client sends the next request while it reads the answer to the first."""
    client = connect()
    client.data_received(b"head")
    client.cycle.response_started, client.cycle.response_complete = True, is_complete
    client.overhead = MOST_OVERHEAD + 1
    client.data_received(b"")
    assert (bool(client.refused), client.transport.aborted) == (is_complete, not is_complete)
    client.connection_lost(None)


async def test_waiting_requests_are_bounded():
    """uvicorn keeps any number of them."""
    client = connect()
    client.data_received(b"head")
    client.pipeline = [None] * MOST_WAITING
    with pytest.raises(ValueError, match="too many"):
        client.on_headers_complete()
    assert client.begun == 1


async def test_a_client_that_reads_nothing_is_left(monkeypatch):
    """One that reads again is not."""
    monkeypatch.setattr(connection, "STALL_S", 0.02)
    stalled, slow = connect(), connect()
    for client in (stalled, slow):
        client.data_received(b"head")
        client.pause_writing()
    slow.resume_writing()
    await asyncio.sleep(0.2)
    assert (stalled.transport.aborted, slow.transport.aborted) == (True, False)


def test_uvicorn_without_its_fast_protocol_is_refused(monkeypatch):
    """Its other protocol has none of these limits."""
    monkeypatch.setitem(sys.modules, "uvicorn.protocols.http.httptools_impl", None)
    with pytest.raises(ConfigError, match="OPENAI_PORT: uvicorn with httptools"):
        connection.bounded()
