"""A request's answer has exactly one end, and nothing is asked about it at that moment or later."""

from __future__ import annotations

import threading

import pytest

from support.fake_reply import FakeChannel, fake_reply
from support.patience import LIMIT
from triton_vllm.base.errors import CancelledError, InternalError, InvalidRequestError
from triton_vllm.reply.reply import NOT_SENT, Reply


@pytest.fixture
def channel():
    return FakeChannel()


@pytest.fixture
def reply(channel):
    return fake_reply(channel)


@pytest.mark.parametrize("end", [lambda r: r.send(["end"], final=True), lambda r: r.fail(InvalidRequestError("bad"))])
@pytest.mark.parametrize(
    "late",
    [
        lambda r: r.send(["late"], final=False),
        lambda r: r.send(["late"], final=True),
        lambda r: r.fail(InternalError("late")),
    ],
)
def test_nothing_follows_the_final_response(channel, reply, end, late):
    """The server refuses, or crashes at, a second final response: whatever comes late is dropped."""
    end(reply)
    late(reply)
    assert len(channel.sent) == 1
    assert channel.sent[0][1] is True


@pytest.mark.parametrize("final", [False, True])
def test_a_response_that_cannot_be_sent_ends_in_an_error_without_internals(channel, reply, final):
    """`send` raises what the server raised; `give_up` then tells the client that something is missing."""
    channel.broken = [RuntimeError("shared memory is full")]
    with pytest.raises(RuntimeError, match="shared memory"):
        reply.send(["a"], final=final)
    reply.give_up()
    ((error, last),) = channel.sent
    assert (str(error), type(error), last) == (NOT_SENT, InternalError, True)
    assert reply.closed


def test_the_server_is_asked_while_the_reply_is_open_and_never_after(channel, reply):
    """A question about a request whose final response is out crashes the server."""
    assert reply.is_cancelled() is False
    reply.send(["a"], final=False)
    assert reply.is_cancelled() is False
    assert channel.asked == 2
    channel.cancelled = True
    reply.send(["b"], final=True)
    assert reply.is_cancelled() is False
    assert channel.asked == 2


def test_a_cancelled_reply_is_open_until_the_client_is_told(channel, reply):
    """The server's word is kept and not asked for again; the error that follows is the final response."""
    channel.cancelled = True
    assert reply.is_cancelled() is True
    assert reply.is_cancelled() is True
    assert channel.asked == 1
    assert reply.cancelled
    assert not reply.closed
    reply.fail(CancelledError("Request was cancelled"))
    assert reply.closed
    assert reply.is_cancelled() is False


@pytest.mark.parametrize(
    "end", [lambda r: r.send(["end"], final=True), lambda r: r.fail(InternalError("x")), lambda r: r.give_up()]
)
def test_the_final_response_waits_for_a_running_question(end):
    """The server must have answered before the final response goes out, whichever way the reply ends."""
    asking, answer = threading.Event(), threading.Event()
    order: list[str] = []

    class Slow(FakeChannel):
        def is_cancelled(self):
            asking.set()
            answer.wait(LIMIT)
            order.append("answered")
            return False

        def send(self, tensors, *, final, whole=False):
            order.append("final")

        def send_error(self, error):
            order.append("final")

    reply = fake_reply(Slow())
    asker = threading.Thread(target=reply.is_cancelled, daemon=True)
    ender = threading.Thread(target=end, args=(reply,), daemon=True)
    asker.start()
    assert asking.wait(LIMIT)
    ender.start()
    ender.join(0.1)  # a reply that does not wait is through by now, unless the machine is very busy
    assert order == []
    answer.set()
    asker.join()
    ender.join()
    assert order == ["answered", "final"]


def test_the_reply_is_closed_before_its_final_response_is_out():
    """A question asked while the final response is on its way must not reach the server."""
    seen = []
    reply: Reply

    class Looks(FakeChannel):
        def send(self, tensors, *, final, whole=False):
            seen.append((final, reply.closed))

        def send_error(self, error):
            seen.append((True, reply.closed))

    for end in (
        lambda r: (r.send(["a"], final=False), r.send(["b"], final=True)),
        lambda r: r.fail(InternalError("x")),
        lambda r: r.give_up(),
    ):
        reply = fake_reply(Looks())
        end(reply)
    assert seen == [(False, False), (True, True), (True, True), (True, True)]
