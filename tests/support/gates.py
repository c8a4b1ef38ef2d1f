"""The real gate, in front of an engine of which a test says what state it is in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from triton_vllm.base.dialect import OURS
from triton_vllm.base.errors import DEAD, AdapterError
from triton_vllm.base.limits import Limits
from triton_vllm.base.triton import Channel
from triton_vllm.engine.gate import Gate

if TYPE_CHECKING:
    from support.fake_triton import Request
    from triton_vllm.base.dialect import Dialect
    from triton_vllm.engine.order import Order
    from triton_vllm.request.admit import Admission


def admit(admission: Admission, request: Request, dialect: Dialect = OURS) -> Order | None:
    """Return what a request asks of vLLM; a refused one gets the reason as its answer, as from the service."""
    try:
        return admission.admit(request)
    except AdapterError as error:
        log: Any = SimpleNamespace(error=print)
        Channel(request, dialect, log, lambda end, _: end(), errors_apart=True).send_error(error)
        return None


def open_gate(*, healthy=True, in_flight=0, asleep=False, most=0, when_dead=None):
    """Return a gate; by default it lets everything in."""
    ledger = SimpleNamespace(count_of_all=lambda: in_flight)
    jobs: Any = SimpleNamespace(is_up=lambda: healthy, why_down=DEAD, ledger=ledger)
    operator: Any = SimpleNamespace(asleep=asleep)
    return Gate(jobs, operator, Limits(max_requests_in_flight=most), when_dead)
