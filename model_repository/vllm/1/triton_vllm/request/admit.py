"""Check a Triton request, or raise the reason for its refusal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triton_vllm.base import triton
from triton_vllm.operator import request as operator
from triton_vllm.request.parse import parse

if TYPE_CHECKING:
    from triton_vllm.base.dialect import Dialect
    from triton_vllm.base.protocols import TritonRequest
    from triton_vllm.request.kinds import AnyCall, Served


def admit(request: TritonRequest, served: Served, dialect: Dialect) -> AnyCall:
    """Read and check a request, and return the call of the engine that it asks for.

    Args:
        request: the request.
        served: the model.
        dialect: our behaviour or the official backend's.

    Raises:
        AdapterError: the reason for a refusal.
    """
    fit = served.fit
    # 1) Refuse what no request may do now, before anything is read.
    inputs = triton.inputs(request)
    fit.gate.let_in(to_operator=operator.INPUT_NAME in inputs)
    # 2) Read the request.
    parameters = triton.parameters(request)
    timeout = triton.timeout_us(request) if dialect.reads_timeout else 0
    parsed = parse(inputs, parameters, timeout=timeout, limits=fit.limits, dialect=dialect)
    # 3) Check it against this model. vLLM gets a request's trace only if it writes traces.
    options = {}
    headers = triton.trace_headers(request) if fit.facts.traces else None
    if headers:
        options["trace_headers"] = headers
    return parsed.call(served, options)
