"""An HTTP server that speaks vLLM's OpenAI protocol and echoes; for tests of clients without a model."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import TYPE_CHECKING, Any

from aiohttp import web

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Sequence

MODELS = ("echo", "adapter")


class OpenAIEcho:
    """A context manager. A prompt with the word "fail" gets an error; a token is a letter.

    Args:
        delay: seconds to wait before the answer to a request, by its number.
        counts: whether it counts the tokens of an answer, by the number of its request.
        key: it wants this as `authorization`.
        port: the port to listen on; 0 takes a free one.
        tls: for HTTPS.
        cut: bytes of a stream after which it closes the connection; negative ones end the stream in order.
        pause: seconds from the last line of a stream to its end.
        events: the data of each stream, instead of the echo.
        idle: seconds after which it closes an idle connection.
        moved: where it sends those who ask for its models.
    """

    def __init__(
        self,
        delay: Callable[[int], float] = lambda _: 0.0,
        *,
        counts: Callable[[int], bool] = lambda _: True,
        key: str = "",
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        cut: int = 0,
        pause: float = 0.0,
        events: Sequence[str] = (),
        idle: float = 60.0,
        moved: str = "",
    ) -> None:
        self.url = ""
        self.asked: list[tuple[str, dict[str, Any]]] = []
        """Path and body of each request so far."""
        self.connections: set[object] = set()
        """Client's addresses so far."""
        self.connected_for_an_answer = 0
        """Requests for an answer that came first on their connection."""
        self.listed = 0
        """How often it has listed its models."""
        self.gone = threading.Event()
        """Set when a client has closed the connection of a stream."""
        self.models: Any = {"data": [{"id": name} for name in MODELS]}
        self._delay = delay
        self._counts = counts
        self._key = key
        self.port = port
        self._tls = tls
        self._cut = cut
        self._pause = pause
        self._events = events
        self._idle = idle
        self._moved = moved
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._runner: Any = None

    def __enter__(self) -> OpenAIEcho:  # noqa: PYI034 - Self is not in the typing of Python 3.10
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        application = web.Application()
        application.router.add_get("/v1/models", self._models)
        application.router.add_post("/v1/completions", self._answer)
        application.router.add_post("/v1/chat/completions", self._answer)
        self._runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1, keepalive_timeout=self._idle)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=self._tls)
        await site.start()
        self.url = f"127.0.0.1:{self._runner.addresses[0][1]}"

    async def _models(self, request: web.Request) -> web.Response:
        assert request.transport
        self.connections.add(request.transport.get_extra_info("peername"))
        if self._key and request.headers.get("authorization") != self._key:
            return web.json_response({"error": {"message": "Unauthorized"}}, status=401)
        if self._moved:
            raise web.HTTPTemporaryRedirect(self._moved)
        self.listed += 1
        return web.json_response(self.models)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        assert request.transport
        address = request.transport.get_extra_info("peername")
        self.connected_for_an_answer += address not in self.connections
        self.connections.add(address)
        body = await request.json()
        number = len(self.asked)
        self.asked.append((request.path, body))
        chat = request.path.startswith("/v1/chat")
        prompt = body["messages"][-1]["content"] if chat else body["prompt"]
        await asyncio.sleep(self._delay(number))
        if "fail" in prompt and not body["stream"]:
            error = {"message": "told to fail", "type": "BadRequestError", "code": 400}
            return web.json_response({"error": error}, status=400)
        texts = [f" {index}: {prompt}" for index in range(body.get("n", 1))]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": sum(map(len, texts))} if self._counts(number) else None
        if body["stream"]:
            return await self._stream(request, texts, usage, chat=chat, fails="fail" in prompt)
        choices = [
            {"index": index, "finish_reason": "stop", **({"message": {"content": text}} if chat else {"text": text})}
            for index, text in enumerate(texts)
        ]
        return web.json_response({"choices": choices[::-1], **({"usage": usage} if usage else {})})

    async def _stream(
        self, request: web.Request, texts: list[str], usage: dict[str, int] | None, *, chat: bool, fails: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        chunks: list[dict[str, Any]] = []
        for index, text in enumerate(texts):
            role = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            chunks += [{"choices": [role]}] if chat else []
            for at, letter in enumerate(text, 1):
                piece: dict[str, Any] = {"delta": {"content": letter}} if chat else {"text": letter}
                reason = "length" if at == len(text) else None
                chunks.append({"choices": [{"index": index, "finish_reason": reason, **piece}]})
        if fails:
            chunks[1:] = [{"error": {"message": "told to fail", "code": 500}}]
        if usage:
            chunks.append({"choices": [], "usage": usage})
        events = self._events or [*(json.dumps(chunk, ensure_ascii=False) for chunk in chunks), "[DONE]"]
        lines = [": a comment", *(f"data: {event}" for event in events)]
        data = "".join(f"{line}\n\n" for line in lines).encode()
        if self._cut:
            data = data[: self._cut]
        # Odd sizes, so that lines and characters are cut.
        try:
            for at in range(0, len(data), 37):
                await response.write(data[at : at + 37])
                await asyncio.sleep(0)
            await asyncio.sleep(self._pause)
        except (ConnectionError, asyncio.CancelledError):
            self.gone.set()
            raise
        if self._cut > 0:
            assert request.transport
            request.transport.close()
        return response
