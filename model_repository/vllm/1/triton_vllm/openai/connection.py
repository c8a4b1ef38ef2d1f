"""Bound what a connection costs before its request is known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triton_vllm.base.errors import ConfigError

if TYPE_CHECKING:
    import asyncio

HEAD_S = 30.0
"""How long a request's head may take to arrive on an open connection, s."""
# uvicorn answers 503 only after it has read a request's head.
MOST_REFUSED = 256
"""Connections above uvicorn's limit that may wait for such an answer."""
MOST_OVERHEAD = 64 * 1024
"""Bytes of a request that are not its body: line, headers, the lengths of its chunks."""
MOST_WAITING = 16
"""Requests that a client may send before the first is answered."""
STALL_S = 120.0
"""How long a client may read nothing of an answer that is waiting for it, s."""


def bounded() -> Any:
    """Return uvicorn's HTTP protocol with these limits.

    Raises:
        ConfigError: there is no such protocol.
    """
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError as error:
        raise ConfigError(
            f"OPENAI_PORT: uvicorn with httptools, which vLLM requires, is missing: {error}; "
            "build the environment again"
        ) from None
    return type("Bounded", (Bounds, HttpToolsProtocol), {})


class Bounds:
    """The limits, for a class that also inherits uvicorn's protocol.

    httptools keeps a header of any length, and any number of headers and requests.
    """

    overhead = 0
    head_timer: asyncio.TimerHandle | None = None
    stall_timer: asyncio.TimerHandle | None = None
    # uvicorn's
    cycle: Any
    loop: Any
    pipeline: Any
    send_400_response: Any
    transport: Any

    def connection_made(self, transport: Any) -> None:
        """See ``asyncio.Protocol``."""
        super().connection_made(transport)  # type: ignore[misc]
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """See ``asyncio.Protocol``."""
        self._stop_head_timer()
        self._stop_stall_timer()
        super().connection_lost(exc)  # type: ignore[misc]

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``. ``on_body`` takes the bytes of a body off the overhead."""
        self.overhead += len(data)
        # uvicorn's cycle is one request with its response.
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self.head_timer is None:
            self._start_head_timer()
        super().data_received(data)  # type: ignore[misc]
        if self.overhead > MOST_OVERHEAD and not self.transport.is_closing():
            self._refuse_overhead()

    def pause_writing(self) -> None:
        """See ``asyncio.Protocol``."""
        super().pause_writing()  # type: ignore[misc]
        self._stop_stall_timer()
        self.stall_timer = self.loop.call_later(STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        """See ``asyncio.Protocol``."""
        self._stop_stall_timer()
        super().resume_writing()  # type: ignore[misc]

    def on_headers_complete(self) -> None:
        """Called by the parser at the end of a request's head."""
        self._stop_head_timer()
        # uvicorn answers an exception of its parser with a 400.
        if len(self.pipeline) >= MOST_WAITING:
            raise ValueError("too many requests wait on one connection")
        super().on_headers_complete()  # type: ignore[misc]

    def on_body(self, body: bytes) -> None:
        """Called by the parser with a part of the body."""
        self.overhead = max(self.overhead - len(body), 0)
        super().on_body(body)  # type: ignore[misc]

    def on_message_complete(self) -> None:
        """Called by the parser after the body."""
        super().on_message_complete()  # type: ignore[misc]
        self.overhead = 0

    def _refuse_overhead(self) -> None:
        """Close the connection, after an answer with status 400 if one can be written."""
        cycle = self.cycle
        # The answer to an earlier request may be half written.
        is_answering = cycle is not None and cycle.response_started and not cycle.response_complete
        if is_answering:
            self.transport.abort()
            return
        # This closes the connection, too.
        self.send_400_response(f"more than {MOST_OVERHEAD} bytes of the request are not its body")

    def _stop_stall_timer(self) -> None:
        if self.stall_timer is not None:
            self.stall_timer.cancel()
            self.stall_timer = None

    def _start_head_timer(self) -> None:
        self.head_timer = self.loop.call_later(HEAD_S, self.transport.abort)

    def _stop_head_timer(self) -> None:
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None
