"""HTTP/1.1 over one kept-alive connection, as cheap as asyncio allows: the load generator must not be the bottleneck."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from harness.load import Request
    from harness.metrics import Answer


class HttpError(Exception):
    """A server answered with a status other than 200."""


class HttpConnection:
    """One connection, which handles one request at a time."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str
    ) -> None:
        self._reader, self._writer, self._host = reader, writer, host

    @classmethod
    async def open(cls, port: int) -> HttpConnection:
        """Connect to a server on this machine."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        return cls(reader, writer, f"127.0.0.1:{port}")

    async def post(self, path: str, body: bytes) -> AsyncIterator[bytes]:
        """Send ``body`` (JSON) and yield the answer's body as it arrives."""
        head = f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        self._writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        headers = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        ok = headers.startswith(b"http/1.1 200")
        pieces = (
            self._chunked() if b"transfer-encoding: chunked" in headers else self._sized(headers)
        )
        if not ok:
            raise HttpError(
                b"".join([piece async for piece in pieces]).decode(errors="replace")[:500]
            )
        async for piece in pieces:
            yield piece

    async def _chunked(self) -> AsyncIterator[bytes]:
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            # Each chunk ends with a line end, which is not part of it.
            yield (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readuntil(b"\r\n")

    async def _sized(self, headers: bytes) -> AsyncIterator[bytes]:
        length = int(headers.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
        yield await self._reader.readexactly(length)

    async def close(self) -> None:
        """Close the connection."""
        self._writer.close()


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event."""
    rest = b""
    async for piece in pieces:
        *complete, rest = (rest + piece).split(b"\n\n")
        for event in complete:
            if event.startswith(b"data: "):
                yield event[6:]


class OpenAIClient:
    """A client for the completions endpoint of vLLM's own server."""

    def __init__(self, connection: HttpConnection, model: str) -> None:
        self._connection, self._model = connection, model

    async def ask(self, request: Request, answer: Answer) -> None:
        """See ``load.Client``."""
        body = {
            "model": self._model,
            "prompt": request.prompt,
            "max_tokens": request.answer_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": request.stream,
        }
        pieces = self._connection.post("/v1/completions", json.dumps(body).encode())
        if not request.stream:
            answer.add(
                json.loads(b"".join([piece async for piece in pieces]))["choices"][0]["text"]
            )
            return
        async for event in events(pieces):
            if event != b"[DONE]":
                answer.add(json.loads(event)["choices"][0]["text"])

    async def close(self) -> None:
        """See ``load.Client``."""
        await self._connection.close()
