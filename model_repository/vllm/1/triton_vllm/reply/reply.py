"""The answer to one of Triton's requests: what waits to be sent, and the rules for sending it."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from triton_vllm.base.errors import AdapterError, InternalError
from triton_vllm.engine.job import Delivery, Item

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from triton_vllm.base.protocols import Output, Tensors
    from triton_vllm.base.triton import Channel

NOT_SENT = "the response could not be sent; the server's log tells why"


class ResponseBuilder(Protocol):
    """Makes the responses of one request."""

    def build(self, outputs: Sequence[Any]) -> Tensors:
        """Return the tensors of one response from the outputs since the previous one."""


# Two replies are never equal, and the text of a reply would show a client's answer.
@dataclass(slots=True, eq=False, repr=False)
class Reply(Delivery):
    """A request's answer: open at first, possibly cancelled by the client, and closed at the end.

    Each request gets exactly one final response. One thread at a time sends; any thread may ask.

    Args:
        channel: sends responses to the server.
        assembler: makes responses from outputs.
        lane: takes this object when it has something to send, for its sender thread.

    Attributes:
        bulky: whether its response may take long to write, so that others should not wait for it.
        streams: whether the client wants responses before the answer is complete.
        begun: a response is on its way or sent. Read-only for other classes, like ``closed``.
        closed: the final response is on its way or sent.
        cancelled: the server has said that the client cancelled the request. Read-only for other
            classes.
        pending: the items that have not been sent.
        complete: whether the last item is in ``pending`` or has been sent. Set by the event loop,
            before it adds that item.
        refusal: the error to send in place of a bulky answer that has not been written yet. Set by
            the event loop.
        queued: whether the reply waits in the sender's queue.
        call: a new object while a response is being sent, or waits for the server's answer to a
            question; see ``stuck``.
        cut_off: closed by ``abandon``, and the final response is not on its way. The thread whose
            call does not return still has to send it, if the call returns after all.
        due: the outbox's time in seconds before which the next response is not sent. Set by the
            outbox.
    """

    is_watched: ClassVar[bool] = True

    channel: Channel
    assembler: ResponseBuilder
    lane: Callable[[Reply], None]
    bulky: bool = False
    streams: bool = False
    # The event loop appends and the one sender thread removes. Both ends of a deque are atomic, so
    # no lock is needed.
    pending: deque[Item] = field(default_factory=deque)
    begun: bool = False
    cancelled: bool = False
    closed: bool = False
    complete: bool = False
    refusal: AdapterError | None = None
    queued: bool = False
    due: float = 0.0
    call: object | None = None
    cut_off: bool = False
    # With the final response, the server frees its state of the request. If it is asked at that
    # moment or later whether the request is cancelled, it crashes. So a reply closes before it
    # sends its final response, closing waits for a running question, and a closed reply asks
    # nothing. This lock makes closing wait.
    _asking: threading.Lock = field(default_factory=threading.Lock)
    # Makes the thread that sends and the one that abandons agree on whether a call has returned.
    _calling: threading.Lock = field(default_factory=threading.Lock)

    def put(self, item: Output) -> None:
        """Queue an output for sending; it never blocks."""
        self.pending.append(item)
        # A reply that waits for its turn is not queued again for every token.
        if not self.queued:
            self.queued = True
            self.lane(self)

    def end(self, item: Item) -> None:
        """Queue the last item for sending; it never blocks."""
        self.complete = True
        self.pending.append(item)
        # It must not wait for the reply's turn.
        self.queued = True
        self.lane(self)

    def lasts(self, item: Item) -> bool:
        """See ``Delivery``; an answer that is not bulky is written at once."""
        return self.bulky and not isinstance(item, AdapterError)

    def refuse(self, error: AdapterError) -> None:
        """See ``Delivery``."""
        self.refusal = error

    def send(self, tensors: Tensors, *, final: bool) -> None:
        """Send one response, unless the reply is closed; wait until the server has confirmed it.

        Raises:
            Exception: the server's own exception. Call ``give_up`` then.
        """
        # ``abandon`` has closed a reply that is cut off, because a call did not return. It has
        # returned after all, in this thread, and the client has had no final response.
        has_ended = self.closed and not self.cut_off
        if has_ended:
            return
        self.begun = True
        with self._call():
            if final:
                self._close()
            self.channel.send(tensors, final=final, whole=not self.streams)
        if self.cut_off:
            # The server has taken the response after all, and the client waits for the end.
            self.give_up()

    def fail(self, error: AdapterError) -> None:
        """Send an error as the final response, unless the reply is closed.

        Raises:
            Exception: the server's own exception. Call ``give_up`` then.
        """
        # See ``send``.
        has_ended = self.closed and not self.cut_off
        if has_ended:
            return
        with self._call():
            self._close()
            self.channel.send_error(error)

    def abandon(self, call: object) -> bool:
        """Close, because this call does not return; return False if it has returned.

        Nothing else is sent until it returns.
        """
        # Unlike ``_close``, this does not wait for a question about the client, which may not
        # return either.
        with self._calling:
            if self.call is not call:
                return False
            self.cut_off = not self.closed
            self.closed = True
            return True

    def give_up(self) -> None:
        """Close after a response could not be built or sent; try to send the client an error."""
        # The server refuses the error if the final response was already on its way.
        with contextlib.suppress(Exception), self._call():
            self._close()
            self.channel.send_error(InternalError(NOT_SENT))

    def is_cancelled(self) -> bool:
        """Return whether the client has cancelled the request; False for a closed reply.

        This is a round trip to the server, until the server has once said yes.
        """
        with self._asking:
            if not self.closed and not self.cancelled:
                self.cancelled = self.channel.is_cancelled()
            return self.cancelled and not self.closed

    def was_cancelled(self) -> bool:
        """Return the same, for the thread that sends."""
        with self._call():
            return self.is_cancelled()

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        """Let ``call`` be a new object while the code in the block calls the server."""
        self.call = object()
        try:
            yield
        finally:
            with self._calling:
                self.call = None

    def _close(self) -> None:
        """Close for a final response that is sent next; wait until no question is running."""
        with self._asking, self._calling:
            self.closed = True
            self.cut_off = False


class NoOutputs:
    """Makes no responses, for a request that vLLM never gets."""

    def build(self, outputs: Sequence[Any]) -> Tensors:
        """See ``ResponseBuilder``."""
        raise NotImplementedError
