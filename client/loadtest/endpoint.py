"""The model to ask, what every client for it can do, and waiting until it is ready."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from loadtest.errors import ClientError, NoSuchModelError, ServerGoneError
from loadtest.loops import Client

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

# A server that is up answers in milliseconds.
PREFLIGHT_SECONDS = 10.0
_POLL_SECONDS = 0.25


@dataclass(frozen=True)
class Endpoint:
    """The model to ask, and how.

    Attributes:
        url: host and port of the server, ``localhost:8001``.
        model: name of the model. If it is empty, the first one of an OpenAI server is asked.
        exclude_input: whether a whole answer leaves the prompt out. A stream always does.
        stream_timeout: seconds for each request; None waits forever.
        first_id: the request with index 0 has this id.
        wait_ready: seconds to wait for the model before the first request.
        reconnect: seconds to wait for the model after the connection was lost. If it is not back by
            then, the run ends. 0 does not wait.
        headers: sent with each request.
        tls: arguments for TLS of ``tritonclient.grpc.InferenceServerClient``.
    """

    url: str
    model: str
    exclude_input: bool = False
    stream_timeout: float | None = None
    first_id: int = 0
    wait_ready: float = 0.0
    reconnect: float = 0.0
    headers: Mapping[str, str] = field(default_factory=dict)
    tls: Mapping[str, Any] = field(default_factory=dict)


class Backend(Client, Protocol):
    """A client for any number of requests at a time to one model.

    It is an asynchronous context manager. ``require_model`` comes before the first request.
    """

    async def __aenter__(self) -> Backend:  # noqa: PYI034 - Self is not in Python 3.10
        """Make what requests need."""

    async def __aexit__(self, *_: object) -> None:
        """Close the connections, and cancel what still runs."""

    async def require_model(self, inputs: Iterable[str]) -> None:
        """Wait until the model is ready, and find out what it takes.

        Args:
            inputs: names of Triton's inputs that the requests need.

        Raises:
            ClientError: there is no such server, no such model, or it cannot take the requests.
        """

    async def connect(self, connections: int) -> None:
        """Open the connections for the next requests, which would otherwise seem slow.

        Args:
            connections: how many are needed. Over gRPC one is enough for all.
        """

    @property
    def model(self) -> str:
        """Return the name of the model that is asked."""

    @property
    def counts_tokens(self) -> bool:
        """Return whether the server tells the number of tokens of an answer."""

    def stop(self) -> None:
        """Let a cancellation of a request end its task, and not count as a lost connection."""


class Readiness:
    """Waits for a server, before the first request and after the connection was lost.

    Args:
        require: raises ``ClientError`` while the server or its model is not ready.
        reconnect: seconds to wait after the connection was lost; 0 does not wait.

    Attributes:
        stopping: whether the run ends.
    """

    def __init__(self, require: Callable[[], Awaitable[None]], reconnect: float) -> None:
        self._require = require
        self._reconnect = reconnect
        self._returning = asyncio.Lock()  # held by the request that waits for the server
        self.stopping = False

    async def wait(self, seconds: float, *, again: bool = False) -> None:
        """Wait until the model is ready.

        Args:
            seconds: the longest wait.
            again: the server has had the model before. So if it does not list the model now, it may
                do so later.

        Raises:
            NoSuchModelError: the server is ready, and has no such model. With ``again``, this is
                raised only after ``seconds``, too.
            ClientError: it is not ready after ``seconds``.
        """
        until = time.monotonic() + seconds
        while True:
            try:
                await self._require()
            except ClientError as error:
                is_hopeless = isinstance(error, NoSuchModelError) and not again
                if is_hopeless or time.monotonic() >= until:
                    raise
                await asyncio.sleep(_POLL_SECONDS)
            else:
                return

    async def wait_again(self) -> None:
        """Wait for the server after a lost connection, if the run is to do so.

        Raises:
            ServerGoneError: it has not come back.
            asyncio.CancelledError: the run ends.
        """
        if not self._reconnect:
            return
        # The first request that was lost asks, and the others wait for the lock. If the server does
        # not come back, the first one sets `stopping`, and the others do not wait again.
        async with self._returning:
            if self.stopping:
                raise asyncio.CancelledError
            try:
                await self.wait(self._reconnect, again=True)
            except ClientError as error:
                self.stopping = True
                raise ServerGoneError(
                    f"the connection was lost, and after {self._reconnect:g} s "
                    f"(--reconnect) {error}"
                ) from error
