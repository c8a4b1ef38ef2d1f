"""Each reply's outputs become responses, its last item the final one, whatever fails on the way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from support.fake_log import FakeLog
from support.fake_reply import FakeChannel, fake_reply
from triton_vllm.base.errors import CancelledError, InternalError, StoppedError, UnavailableError
from triton_vllm.reply.deliver import deliver
from triton_vllm.reply.reply import NOT_SENT
from triton_vllm.reply.response import NOTHING


@pytest.fixture
def log():
    return FakeLog()


def output(*, finished=False):
    return SimpleNamespace(finished=finished)


def test_outputs_that_came_before_an_error_are_sent_before_it(log):
    """A deadline takes nothing away that was there in time."""
    channel = FakeChannel()
    first, second, error = output(), output(), UnavailableError("timeout of 5 us expired")
    deliver(log, fake_reply(channel), [first, second, error])
    assert channel.sent == [([first, second], False), (error, True)]


def test_a_client_that_has_cancelled_gets_no_more_outputs(log):
    """It has said that it wants none; the log says so in the official backend's words."""
    channel = FakeChannel()
    error = CancelledError("Request was cancelled")
    deliver(log, fake_reply(channel), [output(), error])
    assert channel.sent == [(error, True)]
    assert log.infos == ["[vllm] Cancelling the request", "[vllm] Successfully cancelled the request"]


def test_a_client_is_told_that_outputs_before_an_error_are_missing(log):
    """They could not be sent, and the log says why."""
    channel = FakeChannel()
    channel.broken = [RuntimeError("shared memory is full")]
    deliver(log, fake_reply(channel), [output(), UnavailableError("timeout of 5 us expired")])
    assert [(type(error), final) for error, final in channel.sent] == [(InternalError, True)]
    assert "shared memory is full" in log.errors[0]


def test_a_stream_that_a_stop_ends_begins_first(log):
    """Triton makes an error event of what follows a response; an error that comes first gets status 400 over HTTP."""
    channel, error = FakeChannel(), StoppedError("the model was unloaded")
    reply = fake_reply(channel, streams=True)
    deliver(log, reply, [error])
    assert channel.sent == [([NOTHING], False), (error, True)]


def test_a_stream_that_has_begun_is_not_begun_again(log):
    """Nor if each output is delivered alone, with the error after them."""
    channel, first, error = FakeChannel(), output(), StoppedError("the model was unloaded")
    reply = fake_reply(channel, streams=True)
    deliver(log, reply, [first])
    deliver(log, reply, [error])
    assert channel.sent == [([first], False), (error, True)]


@pytest.mark.parametrize("case", ["not a stream", "another error"])
def test_no_other_error_follows_an_empty_response(log, case):
    """A whole answer has one response, and another error keeps its status."""
    channel = FakeChannel()
    error = UnavailableError("timeout of 5 us expired") if case == "another error" else StoppedError("unloaded")
    reply = fake_reply(channel, streams=case != "not a stream")
    deliver(log, reply, [error])
    assert channel.sent == [(error, True)]


class Broken:
    """An assembler that fails."""

    def build(self, outputs):
        raise KeyError("secret")


@pytest.mark.parametrize("fault", ["build", "send", "final send"])
def test_a_response_that_cannot_be_made_or_sent_ends_the_job(log, fault):
    """The engine stops working on it, the client gets an error without internals, the log has the reason."""
    channel = FakeChannel()
    reply = fake_reply(channel, assembler=Broken() if fault == "build" else None)
    channel.broken = [] if fault == "build" else [KeyError("secret")]
    deliver(log, reply, [output(finished=fault == "final send")])
    ((error, final),) = channel.sent
    assert (type(error), str(error), final) == (InternalError, NOT_SENT, True)
    assert "secret" in log.errors[0]
    assert reply.closed


class Wrong:
    """An assembler that finds an answer that cannot be sent."""

    def build(self, outputs):
        raise InternalError("the numbers are not finite")


@pytest.mark.parametrize("final", [True, False])
def test_what_is_wrong_with_an_answer_is_said(log, final):
    """Not that it could not be sent; vLLM need not go on with it."""
    channel = FakeChannel()
    reply = fake_reply(channel, assembler=Wrong())
    deliver(log, reply, [output(finished=final)])
    assert [(str(error), final) for error, final in channel.sent] == [("the numbers are not finite", True)]
    assert reply.closed


@pytest.mark.parametrize("gone", ["refused", "cancelled"])
def test_a_bulky_answer_is_not_written_for_nobody(log, gone):
    """It takes seconds, which others wait for as it has waited for others."""
    channel = FakeChannel()
    built: list[Any] = []
    reply = fake_reply(channel, assembler=SimpleNamespace(build=built.append), bulky=True)
    channel.cancelled = gone == "cancelled"
    reply.refusal = UnavailableError("the model is being unloaded") if gone == "refused" else None
    deliver(log, reply, [output(finished=True)])
    ((error, final),) = channel.sent
    assert isinstance(error, UnavailableError if gone == "refused" else CancelledError)
    assert (final, built, reply.closed) == (True, [], True)
