"""Stands for Triton's side of a request in unit tests of the model: keeps what is sent, answers what is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triton_vllm.engine.order import Order, Prompt
from triton_vllm.operator.request import OperatorRequest
from triton_vllm.reply.reply import Reply

if TYPE_CHECKING:
    from triton_vllm.engine.job import Job


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


class Asked:
    """A request for an engine; what its reply gets goes into the queue of the engine that it is submitted to.

    Attributes:
        order: what is asked of vLLM, or of the engine itself.
        reply: the answer.
        job: the engine's record of it.
    """

    job: Job[Reply]

    def __init__(self, order: Any, reply: Reply) -> None:
        self.order, self.reply = order, reply

    @property
    def id(self) -> str:
        return self.job.id

    def submit(self, engine: Any) -> None:
        def lane(reply: Reply) -> None:
            reply.queued = False
            engine.got.put((reply, reply.pending.pop()))

        self.reply.lane = lane
        take = engine.runner.operate if isinstance(self.order, OperatorRequest) else engine.runner.submit
        self.job = take(self.order, self.reply)


def fake_operation(operation: str, **arguments: Any) -> Asked:
    """Return an operator's request."""
    return Asked(OperatorRequest(operation, arguments), fake_reply())


def fake_job(
    channel: FakeChannel | None = None, *, bulky: bool = False, n: int = 1, stream: bool = False, lora_name: str | None = None
) -> Asked:
    """Return a request that asks for nothing in particular."""
    order = Order((Prompt("x"),), None, n, streams=stream, lora_name=lora_name)
    return Asked(order, fake_reply(channel, bulky=bulky))


def fake_reply(channel: Any = None, *, assembler: Any = None, lane: Any = None, **options: Any) -> Reply:
    """Return an open reply."""
    return Reply(channel or FakeChannel(), assembler or Joined(), lane or (lambda _: None), **options)
