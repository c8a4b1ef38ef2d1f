"""The real gate, in front of an engine of which a test says what state it is in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from triton_vllm.base.dialect import OURS
from triton_vllm.base.errors import DEAD, AdapterError
from triton_vllm.base.limits import USUAL
from triton_vllm.base.refusals import Refusals
from triton_vllm.base.triton import Channel
from triton_vllm.engine.fit import Fit
from triton_vllm.engine.gate import Gate
from triton_vllm.operator.run import Operator
from triton_vllm.request.admit import admit

if TYPE_CHECKING:
    from support.fake_triton import Request
    from triton_vllm.base.dialect import Dialect
    from triton_vllm.request.kinds import Served


def admitted(request: Request, served: Served, dialect: Dialect = OURS) -> Any:
    """Return the call of a request; a refused one gets the reason as its answer, as from the service."""
    try:
        return admit(request, served, dialect)
    except AdapterError as error:
        log: Any = SimpleNamespace(error=print)
        Channel(request, dialect, log, lambda end, _: end(), errors_apart=True, refusals=Refusals()).send_error(error)
        return None


def fit_of(facts, limits=USUAL, *, healthy=True, in_flight=0, asleep=False):
    """Return the checks in front of an engine in this state; by default its gate lets everything in."""
    ledger = SimpleNamespace(count_of_all=lambda: in_flight)
    jobs: Any = SimpleNamespace(is_up=lambda: healthy, why_down=DEAD, ledger=ledger)
    state: Any = SimpleNamespace(asleep=asleep, closed=False)
    log: Any = None
    return Fit(facts, limits, Gate(jobs, Operator(lambda: in_flight, state, None, log), limits, None))
