"""A client for HTTP/1.1 that uses little processor time, so that it does not limit the targets."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from harness.shapes import count_tokens

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from loadtest.record import Record, Request


class HttpError(Exception):
    """A server answered with a status other than 200."""


class HttpConnection:
    """One connection, which handles one request at a time and stays open."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._host = host

    @classmethod
    async def open(cls, port: int) -> HttpConnection:
        """Connect to a server on this machine."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        return cls(reader, writer, f"127.0.0.1:{port}")

    async def post(self, path: str, body: bytes) -> AsyncIterator[bytes]:
        """Send ``body`` (JSON) and yield the answer's body as it arrives.

        Raises:
            HttpError: the status is not 200. The message is the beginning of the body.
        """
        head = f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        self._writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        # The names of headers may be in any case.
        headers = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        # A streamed answer has no length in front.
        chunked = b"transfer-encoding: chunked" in headers
        pieces = self._chunked() if chunked else self._sized(headers)
        if not headers.startswith(b"http/1.1 200"):
            raise HttpError((await _joined(pieces)).decode(errors="replace")[:500])
        async for piece in pieces:
            yield piece

    async def _chunked(self) -> AsyncIterator[bytes]:
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            # Each chunk ends with a line end, which is not part of it.
            yield (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readuntil(b"\r\n")

    async def _sized(self, headers: bytes) -> AsyncIterator[bytes]:
        length = headers.partition(b"content-length:")[2].partition(b"\r\n")[0]
        yield await self._reader.readexactly(int(length))

    async def close(self) -> None:
        """Close the connection."""
        self._writer.close()


async def _joined(pieces: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in pieces])


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event."""
    rest = b""
    async for piece in pieces:
        # A piece may end within an event.
        *complete, rest = (rest + piece).split(b"\n\n")
        for event in complete:
            if event.startswith(b"data: "):
                yield event[6:]


def _text(completion: bytes) -> str:
    text: str = json.loads(completion)["choices"][0]["text"]
    return text


class OpenAIClient:
    """A client for the completions endpoint of vLLM's own server."""

    def __init__(self, connection: HttpConnection, model: str) -> None:
        self._connection = connection
        self._model = model

    async def ask(self, request: Request, record: Record) -> None:
        """See ``loops.Client``."""
        body = {
            "model": self._model,
            "prompt": request.prompt,
            "stream": request.stream,
            **request.parameters,
        }
        pieces = self._connection.post("/v1/completions", json.dumps(body).encode())
        if not request.stream:
            text = _text(await _joined(pieces))
            record.add((text,), count_tokens(text))
            return
        async for event in events(pieces):
            # The last event of a stream is not JSON.
            if event != b"[DONE]":
                text = _text(event)
                record.add((text,), count_tokens(text))

    async def close(self) -> None:
        """See ``load.Client``."""
        await self._connection.close()
