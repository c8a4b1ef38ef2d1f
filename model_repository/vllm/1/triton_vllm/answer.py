"""The answer to one request: the items that wait to be sent, and the rules for sending them."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from triton_vllm.base.errors import AdapterError, InternalError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triton_vllm.base.protocols import Item, Tensors
    from triton_vllm.base.triton import Channel

NOT_SENT = "the response could not be sent; the server's log tells why"


class ResponseBuilder(Protocol):
    """Makes the responses of one request."""

    def build(self, outputs: Sequence[Any]) -> Tensors:
        """Return the tensors of one response from the outputs since the previous one."""


# Two replies are never equal, and the text of a reply would show a client's answer.
@dataclass(slots=True, eq=False, repr=False)
class Reply:
    """A request's answer: open at first, possibly cancelled by the client, and closed at the end.

    Each request gets exactly one final response. One thread at a time sends; any thread may ask.

    Attributes:
        begun: a response is on its way or sent. Read-only for other classes, like ``closed``.
        closed: the final response is on its way or sent.
        cancelled: the server has said that the client cancelled the request. Read-only for other
            classes.
        assembler: makes responses from outputs. Set by the service.
        bulky: whether its response may take long to write, so that others should not wait for it.
            Set by ``request``.
        streams: whether the client wants responses before the answer is complete. Set by
            ``request``.
        pending: the items that have not been sent.
        complete: whether the last item is in ``pending`` or has been sent. Set by the event loop,
            before it adds that item.
        refusal: the error to send in place of a bulky answer that has not been written yet. Set by
            the event loop.
        lane: the number of its sender thread. Set by the outbox, like ``queued`` and ``due``.
        queued: whether the reply waits in the sender's queue.
        due: the outbox's time in seconds before which the next response is not sent.
    """

    _channel: Channel
    assembler: ResponseBuilder = field(init=False)
    # The event loop appends and the one sender thread removes. Both ends of a deque are atomic, so
    # no lock is needed.
    pending: deque[Item] = field(default_factory=deque)
    bulky: bool = False
    streams: bool = False
    begun: bool = False
    cancelled: bool = False
    closed: bool = False
    complete: bool = False
    refusal: AdapterError | None = None
    lane: int = 0
    queued: bool = False
    due: float = 0.0
    # With the final response, the server frees its state of the request. If it is asked at that
    # moment or later whether the request is cancelled, it crashes. So a reply closes before it
    # sends its final response, closing waits for a running question, and a closed reply asks
    # nothing. This lock makes closing wait.
    _asking: threading.Lock = field(default_factory=threading.Lock)

    def send(self, tensors: Tensors, *, final: bool) -> None:
        """Send one response, unless the reply is closed; wait until the server has confirmed it.

        Raises:
            Exception: the server's own exception. Call ``give_up`` then.
        """
        if self.closed:
            return
        self.begun = True
        if final:
            self._close()
        self._channel.send(tensors, final=final, whole=not self.streams)

    def fail(self, error: AdapterError) -> None:
        """Send an error as the final response, unless the reply is closed.

        Raises:
            Exception: the server's own exception. Call ``give_up`` then.
        """
        if self.closed:
            return
        self._close()
        self._channel.send_error(error)

    def give_up(self) -> None:
        """Close after a response could not be built or sent; try to send the client an error."""
        self._close()
        # The server refuses the error if the final response was already on its way.
        with contextlib.suppress(Exception):
            self._channel.send_error(InternalError(NOT_SENT))

    def is_cancelled(self) -> bool:
        """Return whether the client has cancelled the request; False for a closed reply.

        This is a round trip to the server, until the server has once said yes.
        """
        with self._asking:
            if not self.closed and not self.cancelled:
                self.cancelled = self._channel.is_cancelled()
            return self.cancelled and not self.closed

    def _close(self) -> None:
        with self._asking:
            self.closed = True
