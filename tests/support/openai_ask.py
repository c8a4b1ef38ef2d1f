"""Send requests with the client's part for OpenAI servers, and return their records."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from loadtest.endpoint import Endpoint
from loadtest.loops import closed_loop
from loadtest.openai import OpenAIClient
from loadtest.record import Record, Request
from support.openai_echo import OpenAIEcho

if TYPE_CHECKING:
    from collections.abc import Sequence


def request(index: int, prompt: str, *, stream: bool = False, **values: Any) -> Request:
    """Return a request for the likeliest tokens."""
    return Request(index, prompt, {"temperature": 0, **values.pop("parameters", {})}, stream=stream, **values)


def ask(
    server: OpenAIEcho, requests: Sequence[Request], *, places: int = 64, connections: int = 0, **values: Any
) -> dict[int, Record]:
    """Send the requests and return their records by index."""
    done: list[Record] = []

    async def send() -> None:
        async with OpenAIClient(Endpoint(**{"url": server.url, "model": "", "stream_timeout": 60.0} | values)) as client:
            await client.require_model(["image"] if any(each.images for each in requests) else ["text_input"])
            await client.connect(connections)
            await closed_loop([client] * places, ((each,) for each in requests), done.append)

    asyncio.run(send())
    return {record.request.index: record for record in done}
