"""A request that a test can meet in the middle: its responses with their times, and ways to give it up."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tritonclient.grpc as grpcclient

from support.clock import now
from support.triton_client import tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tritonclient.utils import InferenceServerException


@dataclass(frozen=True)
class Event:
    """A response or an error, and when it came (seconds of `clock.now`)."""

    at: float
    text: str = ""
    error: str = ""
    status: str = ""
    final: bool = False


class OpenStream:
    """Sends one request on a gRPC stream of its own; a context manager.

    With ``codes`` the server ends the stream at an error with its gRPC status, as `Event.status` shows it. With
    ``own_connection`` the stream is alone on its connection. Otherwise gRPC's library sends those of a process over the same one.
    """

    def __init__(
        self, url: str, tensors: Mapping[str, Any], *, codes: bool = False, model: str = "vllm", own_connection: bool = False
    ) -> None:
        self.events: list[Event] = []
        self.sent = 0.0
        self._arrived = threading.Condition()
        self._tensors = tensors
        self._codes = codes
        self._model = model
        options = [("grpc.use_local_subchannel_pool", 1)] if own_connection else None
        self._client: Any = grpcclient.InferenceServerClient(url, channel_args=options)

    def __enter__(self) -> OpenStream:  # noqa: PYI034 - Self is not in the typing of Python 3.10
        headers = {"triton_grpc_error": "true"} if self._codes else None
        self._client.start_stream(self._take, headers=headers)
        self.sent = now()
        inputs = [tensor(name, value) for name, value in self._tensors.items()]
        self._client.async_stream_infer(self._model, inputs, enable_empty_final_response=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self.ended:
            self._client.stop_stream()
        else:
            self.cancel()

    def cancel(self) -> None:
        """Give the request up, as a client does that has enough."""
        with contextlib.suppress(Exception):  # a stream that has ended already
            self._client.stop_stream(cancel_requests=True)

    def wait(self, count: int = 1, timeout: float = 300.0) -> list[Event]:
        """Return the events once there are ``count`` of them, or the request has ended."""
        until = now() + timeout
        with self._arrived:
            while not self._arrived.wait_for(lambda: len(self.events) >= count or self.ended, 0.1):
                if now() > until:
                    raise TimeoutError(f"{len(self.events)} of {count} responses after {timeout} s")
        return self.events

    def wait_end(self, timeout: float = 300.0) -> Event:
        """Return how the request ended: the error, which the final response follows, or the final response."""
        return next(event for event in self.wait(1 << 30, timeout) if event.error or event.final)

    @property
    def ended(self) -> bool:
        """Whether the request has ended, well or not."""
        return any(event.error or event.final for event in self.events)

    def _take(self, result: Any, error: InferenceServerException | None) -> None:
        at = now()
        if error is not None:
            event = Event(at, error=error.message(), status=str(error.status()))
        else:
            raw = result.get_response()
            value = result.as_numpy("text_output")
            text = "" if value is None else value.reshape(-1)[0].decode()
            event = Event(at, text, final=raw.parameters["triton_final_response"].bool_param)
        with self._arrived:
            self.events.append(event)
            self._arrived.notify_all()
