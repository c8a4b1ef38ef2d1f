"""The answer to one request: the items that wait to be sent, and the rules for sending and asking."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from triton_vllm.base.errors import AdapterError, InternalError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triton_vllm.base.protocols import Item, Tensors

NOT_SENT = "the response could not be sent; the server's log tells why"


class Channel(Protocol):
    """The way to the client of one request; `base.triton.Channel` in the server."""

    def send(self, tensors: Tensors, *, final: bool) -> None:
        """Send one response."""

    def send_error(self, error: AdapterError) -> None:
        """Send an error as the final response."""

    def is_cancelled(self) -> bool:
        """Ask the server whether the client has cancelled the request or gone away."""


class ResponseBuilder(Protocol):
    """Makes the responses of one request."""

    def build(self, outputs: Sequence[Any]) -> Tensors:
        """Return the tensors of one response from the outputs since the previous one."""


class Reply:
    """A request's answer: open at first, possibly cancelled by the client, and closed at the end.

    Each request gets exactly one final response. With it, the server frees its state of the
    request. The server crashes if it is asked at that moment or later whether the request is
    cancelled. So a reply closes before it sends its final response, closing waits for a running
    question, and a closed reply asks nothing.

    One thread at a time sends; any thread may ask. The event loop fills `pending` and the one
    sender thread drains it. Both ends of a deque are atomic, so no lock is needed.

    Attributes:
        closed: the final response is on its way or sent. Read-only for other classes.
        cancelled: the server has said that the client cancelled the request. Read-only for other
            classes.
        assembler: makes responses from outputs. Set by the service.
        bulky: whether its response may take long to write, so that others should not wait for it.
            Set by `request`.
        pending: the items that have not been sent.
        complete: whether the last item is in `pending` or has been sent. Set by the event loop,
            before it adds that item.
        refusal: the error to send in place of a bulky answer that has not been written yet. Set by
            the event loop.
        lane: the number of its sender thread.
        queued: whether the reply waits in the sender's queue.
        due: the outbox's time before which the next response is not sent. Set by the sender thread.
    """

    __slots__ = (
        "_asking",
        "_channel",
        "assembler",
        "bulky",
        "cancelled",
        "closed",
        "complete",
        "due",
        "lane",
        "pending",
        "queued",
        "refusal",
    )

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._asking = threading.Lock()
        self.cancelled = False
        self.closed = False
        self.assembler: ResponseBuilder
        self.bulky = False
        self.pending: deque[Item] = deque()
        self.complete = False
        self.refusal: AdapterError | None = None
        self.lane = 0
        self.queued = False
        self.due = 0.0

    def send(self, tensors: Tensors, *, final: bool) -> None:
        """Send one response, unless the reply is closed; blocks until the server has confirmed it.

        Raises:
            Exception: the server's own exception. Call `give_up` then.
        """
        if self.closed:
            return
        if final:
            self._close()
        self._channel.send(tensors, final=final)

    def fail(self, error: AdapterError) -> None:
        """Send an error as the final response, unless the reply is closed.

        Raises:
            Exception: the server's own exception. Call `give_up` then.
        """
        if self.closed:
            return
        self._close()
        self._channel.send_error(error)

    def give_up(self) -> None:
        """Close after a response could not be built or sent, and send the client an error if the server still takes it."""
        self._close()
        with contextlib.suppress(
            Exception
        ):  # the server refuses it if the final response was already on its way
            self._channel.send_error(InternalError(NOT_SENT))

    def is_cancelled(self) -> bool:
        """Return whether the client has cancelled the request; a round trip to the server. False for a closed reply."""
        with self._asking:
            if not self.closed and not self.cancelled:
                self.cancelled = self._channel.is_cancelled()
            return self.cancelled and not self.closed

    def _close(self) -> None:
        with self._asking:
            self.closed = True
