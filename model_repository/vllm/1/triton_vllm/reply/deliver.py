"""Make one response from the queued outputs of a request."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from triton_vllm.base import official
from triton_vllm.base.errors import AdapterError, CancelledError, StoppedError
from triton_vllm.reply.response import NOTHING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triton_vllm.base.protocols import Log
    from triton_vllm.engine.job import Item
    from triton_vllm.reply.reply import Reply


def deliver(log: Log, reply: Reply, items: Sequence[Item]) -> None:
    """Send one response for consecutive outputs, then an error if the last item is one.

    This runs in the reply's sender thread and never raises. If something cannot be sent, the reply
    is closed, and the watch ends the request.
    """
    last = items[-1]
    try:
        if reply.bulky and not isinstance(last, AdapterError):
            # A bulky answer may have waited for others, and takes seconds to write. Meanwhile the
            # client may have left, or the model may be unloaded.
            last = _refusal(reply) or last
        if isinstance(last, AdapterError):
            # A client that has cancelled reads no more content.
            has_content = len(items) > 1 and not isinstance(last, CancelledError)
            if has_content:
                reply.send(reply.assembler.build(items[:-1]), final=False)
            elif isinstance(last, StoppedError) and reply.streams and not reply.begun:
                _send_nothing_new(reply)
            _fail(log, reply, last)
        else:
            _send(reply, items, final=last.finished)
    except Exception as error:  # noqa: BLE001 - the thread must serve the next reply
        reply.give_up()
        # The log goes through Triton's shared memory, which may be full.
        with contextlib.suppress(Exception):
            log.error(f"response not sent: {type(error).__name__}: {error}")  # noqa: TRY400


def _send_nothing_new(reply: Reply) -> None:
    """Send a response with empty outputs, so that an error is not the first response."""
    # Over HTTP, an error that comes first gets status 400 from Triton 24.10, as if the request were
    # wrong. After a response it is an error event of the stream. If the response cannot be sent,
    # the client still gets the error.
    with contextlib.suppress(Exception):
        reply.send(reply.assembler.build([NOTHING]), final=False)


def _send(reply: Reply, items: Sequence[Item], *, final: bool) -> None:
    """Send the outputs in one response, or an error if no tensors can be made of them.

    Raises:
        Exception: the server's own exception, or a fault of ours.
    """
    try:
        tensors = reply.assembler.build(items)
    except AdapterError as error:
        # The model's answer cannot be sent. For example, JSON has no infinite numbers.
        reply.fail(error)
    else:
        reply.send(tensors, final=final)


def _fail(log: Log, reply: Reply, error: AdapterError) -> None:
    """Send an error as the final response; log a cancellation as the official backend does.

    Raises:
        Exception: the server's own exception.
    """
    if not isinstance(error, CancelledError):
        reply.fail(error)
        return
    # The official backend logs these two lines, so tools may look for them.
    with contextlib.suppress(Exception):
        log.info(official.CANCELLING)
    reply.fail(error)
    with contextlib.suppress(Exception):
        log.info(official.CANCELLED)


def _refusal(reply: Reply) -> AdapterError | None:
    """Return the error to send in place of a bulky answer; None if the answer is still wanted."""
    if reply.refusal is None and reply.was_cancelled():
        return CancelledError("Request was cancelled")
    return reply.refusal
