"""Each job's outputs become responses, its last item the final one, whatever fails on the way."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from support.fake_log import FakeLog
from support.fake_reply import FakeChannel, fake_job
from triton_vllm.answer import NOT_SENT
from triton_vllm.base.errors import CancelledError, InternalError, UnavailableError
from triton_vllm.reply.deliver import Delivery


@pytest.fixture
def log():
    return FakeLog()


@pytest.fixture
def dropped():
    return []


@pytest.fixture
def delivery(log, dropped):
    return Delivery(dropped.append, log)


def output(*, finished=False):
    return SimpleNamespace(finished=finished)


def test_outputs_become_one_response_that_is_final_if_the_last_one_is(delivery, dropped):
    """What has queued up goes out together; only a finished output closes the reply."""
    channel = FakeChannel()
    job = fake_job(channel)
    first, second, last = output(), output(), output(finished=True)
    delivery.deliver(job, [first, second])
    delivery.deliver(job, [last])
    assert channel.sent == [([first, second], False), ([last], True)]
    assert dropped == []


def test_outputs_that_came_before_an_error_are_sent_before_it(delivery, dropped):
    """A deadline takes nothing away that was there in time."""
    channel = FakeChannel()
    first, second, error = output(), output(), UnavailableError("timeout of 5 us expired")
    delivery.deliver(fake_job(channel), [first, second, error])
    assert channel.sent == [([first, second], False), (error, True)]
    assert dropped == []


def test_a_client_that_has_cancelled_gets_no_more_outputs(delivery, log):
    """It has said that it wants none; the log says so in the official backend's words."""
    channel = FakeChannel()
    error = CancelledError("Request was cancelled")
    delivery.deliver(fake_job(channel), [output(), error])
    assert channel.sent == [(error, True)]
    assert log.infos == ["[vllm] Cancelling the request", "[vllm] Successfully cancelled the request"]


def test_a_cancellation_is_answered_whatever_the_log_does():
    """Its lines are no reason to leave a request open."""
    channel, error = FakeChannel(), CancelledError("Request was cancelled")
    Delivery(pytest.fail, Mute()).deliver(fake_job(channel), [error])
    assert channel.sent == [(error, True)]


def test_a_client_is_told_that_outputs_before_an_error_are_missing(delivery, log):
    """They could not be sent, and the log says why."""
    channel = FakeChannel()
    channel.broken = [RuntimeError("shared memory is full")]
    delivery.deliver(fake_job(channel), [output(), UnavailableError("timeout of 5 us expired")])
    assert [(type(error), final) for error, final in channel.sent] == [(InternalError, True)]
    assert "shared memory is full" in log.errors[0]


class Broken:
    """An assembler that fails."""

    def build(self, outputs):
        raise KeyError("secret")


@pytest.mark.parametrize("fault", ["build", "send", "final send"])
def test_a_response_that_cannot_be_made_or_sent_ends_the_job(delivery, dropped, log, fault):
    """The engine stops working on it, the client gets an error without internals, the log has the reason."""
    channel = FakeChannel()
    job = fake_job(channel, assembler=Broken() if fault == "build" else None)
    channel.broken = [] if fault == "build" else [KeyError("secret")]
    delivery.deliver(job, [output(finished=fault == "final send")])
    ((error, final),) = channel.sent
    assert (type(error), str(error), final) == (InternalError, NOT_SENT, True)
    assert dropped == [job]
    assert "secret" in log.errors[0]
    assert job.reply.closed


def test_a_server_that_takes_nothing_does_not_stop_the_sender(delivery, dropped):
    """Even the fallback may fail: the thread must go on to the next job."""
    channel = FakeChannel()
    channel.broken = [RuntimeError("gone"), RuntimeError("gone")]
    job = fake_job(channel)
    delivery.deliver(job, [output()])
    assert channel.sent == []
    assert dropped == [job]
    assert job.reply.closed


class Mute:
    """A log that fails, as Triton's does where shared memory is full."""

    def error(self, text):
        raise RuntimeError("no log")

    info = error


def test_the_client_is_told_whatever_else_fails():
    """The log and the engine are told after it, and neither may end the sender's thread."""

    def drop(job):
        raise RuntimeError("Event loop is closed")

    channel = FakeChannel()
    job = fake_job(channel, assembler=Broken())
    Delivery(drop, Mute()).deliver(job, [output()])
    assert [str(error) for error, _ in channel.sent] == [NOT_SENT]
    assert job.reply.closed


class Wrong:
    """An assembler that finds an answer that cannot be sent."""

    def build(self, outputs):
        raise InternalError("the numbers are not finite")


@pytest.mark.parametrize("final", [True, False])
def test_what_is_wrong_with_an_answer_is_said(delivery, dropped, final):
    """Not that it could not be sent; vLLM need not go on with it."""
    channel = FakeChannel()
    job = fake_job(channel, assembler=Wrong())
    delivery.deliver(job, [output(finished=final)])
    assert [(str(error), final) for error, final in channel.sent] == [("the numbers are not finite", True)]
    assert dropped == ([] if final else [job])


@pytest.mark.parametrize("gone", ["refused", "cancelled"])
def test_a_bulky_answer_is_not_written_for_nobody(delivery, gone):
    """It takes seconds, which others wait for as it has waited for others."""
    channel, built = FakeChannel(), []
    job = fake_job(channel, assembler=SimpleNamespace(build=built.append))
    job.bulky, channel.cancelled = True, gone == "cancelled"
    job.refusal = UnavailableError("the model is being unloaded") if gone == "refused" else None
    delivery.deliver(job, [output(finished=True)])
    ((error, final),) = channel.sent
    assert isinstance(error, UnavailableError if gone == "refused" else CancelledError)
    assert (final, built, job.reply.closed) == (True, [], True)


def test_a_bulky_answer_goes_to_who_waits_for_it(delivery):
    """The server is asked once before it is written; about other answers it is not asked here."""
    for bulky in (True, False):
        channel, last = FakeChannel(), output(finished=True)
        job = fake_job(channel)
        job.bulky = bulky
        delivery.deliver(job, [last])
        assert (channel.sent, channel.asked) == ([([last], True)], int(bulky))
