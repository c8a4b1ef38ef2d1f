"""The real gate, in front of an engine of which a test says what state it is in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from triton_vllm.answer import Reply
from triton_vllm.base.dialect import OURS
from triton_vllm.base.errors import DEAD, AdapterError
from triton_vllm.base.triton import Channel
from triton_vllm.engine.gate import Gate

if TYPE_CHECKING:
    from support.fake_triton import Request
    from triton_vllm.base.dialect import Dialect
    from triton_vllm.job import Job
    from triton_vllm.request.admit import Admission


def admit(admission: Admission, request: Request, dialect: Dialect = OURS) -> Job | None:
    """Return the job of a request; a refused one gets the reason as its answer, as from the service, and None is returned."""
    reply = Reply(Channel(request, dialect, SimpleNamespace(error=print), lambda end, _: end(), errors_apart=True))
    try:
        return admission.admit(request, reply)
    except AdapterError as error:
        reply.fail(error)
        return None


def open_gate(*, healthy=True, in_flight=0, asleep=False, most=0, when_dead=None):
    """Return a gate; by default it lets everything in."""
    runner: Any = SimpleNamespace(
        is_up=lambda: healthy,
        why_down=DEAD,
        in_flight=SimpleNamespace(count_of_all=lambda: in_flight),
        operator=SimpleNamespace(asleep=asleep),
    )
    return Gate(runner, most, when_dead)
