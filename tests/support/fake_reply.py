"""Stands for Triton's side of a request in unit tests of the model: keeps what is sent, answers what is asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from triton_vllm.answer import Reply
from triton_vllm.job import Job


class FakeChannel:
    """In place of `base.triton.Channel`.

    Attributes:
        sent: a pair for each response, (tensors or error, final), in order.
        asked: how many times the server was asked whether the request is cancelled.
        cancelled: what it answers.
        broken: raised by the next sends, one each.
        whole: whether each response was part of a whole answer.
    """

    def __init__(self) -> None:
        self.sent: list[tuple[Any, bool]] = []
        self.asked = 0
        self.cancelled = False
        self.broken: list[Exception] = []
        self.whole: list[bool] = []

    def send(self, tensors: Any, *, final: bool, whole: bool = False) -> None:
        self._fail_once()
        self.sent.append((tensors, final))
        self.whole.append(whole)

    def send_error(self, error: Any) -> None:
        self._fail_once()
        self.sent.append((error, True))

    def is_cancelled(self) -> bool:
        self.asked += 1
        return self.cancelled

    def _fail_once(self) -> None:
        if self.broken:
            raise self.broken.pop(0)


class Joined:
    """An assembler whose tensors are the outputs themselves."""

    def build(self, outputs: Any) -> Any:
        return list(outputs)


def fake_job(channel: FakeChannel | None = None, *, assembler: Any = None, timeout: int = 0, stream: bool = False) -> Job:
    """Return a job that asks for nothing in particular."""
    request: Any = SimpleNamespace(priority=0, timeout=timeout, stream=stream)
    return Job(request, None, fake_reply(channel, assembler=assembler))


def fake_reply(channel: FakeChannel | None = None, *, assembler: Any = None) -> Reply:
    """Return an open reply."""
    reply = Reply(channel or FakeChannel())
    reply.assembler = assembler or Joined()
    return reply
