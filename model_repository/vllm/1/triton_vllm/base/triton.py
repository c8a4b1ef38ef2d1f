"""The only module that talks to Triton: reads requests, sends responses, logs."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from typing import TYPE_CHECKING, Any

import triton_python_backend_utils as pb_utils

from triton_vllm.base.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from triton_vllm.base import protocols
    from triton_vllm.base.dialect import Dialect
    from triton_vllm.base.errors import AdapterError
    from triton_vllm.base.protocols import Inputs, Metric, Tensors, TritonRequest

TRACE = ("traceparent", "tracestate")
LONGEST_HEADER = 512
"""Characters of a ``tracestate``; W3C allows shortening it to that."""
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where POSIX shared memory lives on Linux
MARGIN = 8 << 20
"""Bytes of shared memory that a response must leave free: for other responses, and for one step of the region's growth."""
PLENTY = 1 << 30
"""Bytes of free shared memory that cannot be used up in ``MOMENT_S``: that would take 50 GB/s."""
MOMENT_S = 0.02
"""How many seconds a measurement of free shared memory is used."""
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
ENDING = "Server not ready"
"""A stopping server's error about each of its models; the error about a model that is not ready has the model's name."""
NO_OUTPUT = "server_ends"
"""An output name that no model has, so that no server passes the question on to the model."""


def inputs(request: TritonRequest) -> Inputs:
    """Return the request's tensors by name."""
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}


def parameters(request: TritonRequest) -> str:
    """Return the request parameters as JSON text.

    Raises:
        InvalidRequestError: they are not UTF-8. Triton passes on an HTTP body's bytes, and decodes
            them only here.
    """
    try:
        return request.parameters()
    except UnicodeDecodeError:
        raise InvalidRequestError("the request parameters must be UTF-8 text") from None


def trace_headers(request: TritonRequest) -> dict[str, str]:
    """Return the request's trace as HTTP headers of W3C's trace context; empty if there is no trace.

    The server's own trace comes first (``--trace-config mode=opentelemetry``). Otherwise it is the
    headers that the frontends forward as parameters (``--http-header-forward-pattern``,
    ``--grpc-header-forward-pattern``).
    """
    context = request.trace().get_context() if hasattr(request, "trace") else None
    try:
        values = json.loads(context or request.parameters() or "{}")
    except (ValueError, RecursionError):
        return {}
    headers = (
        {name.lower(): value for name, value in values.items()} if isinstance(values, dict) else {}
    )
    return {
        name: value
        for name in TRACE
        if isinstance(value := headers.get(name), str) and len(value) <= LONGEST_HEADER
    }


def timeout_us(request: TritonRequest) -> int:
    """Return the request's ``timeout`` parameter in microseconds; Triton keeps it separate from the other parameters."""
    return int(request.timeout()) if hasattr(request, "timeout") else 0


def unload(name: str) -> None:
    """Ask the server to unload a model; returns at once."""
    pb_utils.unload_model(name)


def is_ending(name: str) -> bool:
    """Return whether the server is stopping; a round trip.

    This asks the server for an answer of the model itself. The server refuses before the model sees
    the request: a decoupled model does not answer in this way. Since 26.03 the server may ask the
    model's ``is_ready`` first. A stopping server answers nothing about its models, and its error
    says so.

    ``is_model_ready`` would be a smaller question. But a stopping server answers it with an error.
    The stub reads that error's text after it has let the server free it (24.10, and in the sources
    of 2025). On a busy machine one stub in eighteen died of that, and its requests waited for ever.

    If shared memory is short, nothing is asked: a question that finds no room there ends the stub
    as well.
    """
    if not room.fits(0):
        return False
    request = pb_utils.InferenceRequest(
        model_name=name, requested_output_names=[NO_OUTPUT], inputs=[]
    )
    try:
        error = request.exec().error()
    except (
        pb_utils.TritonModelException
    ):  # no questions are allowed while the model is being unloaded
        return False
    return error is not None and ENDING in error.message()


def shared_memory_free() -> int:
    """Return by how many bytes Triton's region of shared memory can grow; a system call of a microsecond."""
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


class Room:
    """Decides whether a response fits in shared memory.

    The system call releases Python's lock. Getting it back took a tenth of a sender's time with 128
    requests in flight. So there is no system call if ``PLENTY`` was free a moment ago.

    Args:
        free: returns the free bytes.
        clock: returns seconds.
    """

    def __init__(
        self,
        free: Callable[[], int] = shared_memory_free,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._free = free
        self._clock = clock
        self._plenty_until = -math.inf

    def fits(self, size: int) -> bool:
        """Return whether a response of ``size`` bytes fits, with a margin."""
        now = self._clock()
        if now < self._plenty_until and size < MARGIN:
            return True
        free = self._free()
        self._plenty_until = now + MOMENT_S if free > PLENTY else -math.inf
        return free > 2 * size + MARGIN


room = Room()


def _size(tensors: Tensors) -> int:
    return sum(
        sum(map(len, array)) if array.dtype == object else array.nbytes for _, array in tensors
    )


class Channel:
    """The response sender of one request; ``answer`` knows when each method may be called.

    Args:
        request: Triton's request.
        dialect: determines the text and code of errors, and logs them.
        log: the model's log.
    """

    __slots__ = ("_dialect", "_log", "_sender")

    def __init__(self, request: TritonRequest, dialect: Dialect, log: protocols.Log) -> None:
        self._sender = request.get_response_sender()
        self._dialect = dialect
        self._log = log

    def send(self, tensors: Tensors, *, final: bool) -> None:
        """Send one response; blocks until the server has confirmed it.

        Triton's sender closes before it places a final response in shared memory, and takes nothing
        after it. If that answer did not fit, its client would wait for ever. So where it might not
        fit, the end is sent alone, after the content. It fits in the memory that the content has
        left.
        """
        response = pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, array) for name, array in tensors]
        )
        if not final:
            self._sender.send(response, 0)
        elif room.fits(_size(tensors)):
            self._sender.send(response, FINAL)
        else:
            self._sender.send(response, 0)
            del response  # frees its shared memory, which the end then uses
            self._sender.send(flags=FINAL)

    def send_error(self, error: AdapterError) -> None:
        """Send an error as the final response."""
        text, name = self._dialect.error(error)
        with contextlib.suppress(
            Exception
        ):  # the log goes through the shared memory that may be full
            self._dialect.log_error(self._log, text)
        # A code that this Triton does not have becomes UNKNOWN.
        code = getattr(pb_utils.TritonError, name, pb_utils.TritonError.UNKNOWN)
        self._sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(text, code)), FINAL)

    def is_cancelled(self) -> bool:
        """Return whether the client has cancelled the request or gone away; a round trip to the server."""
        return bool(self._sender.is_cancelled())


class TritonMetrics:
    """Creates metrics in the server; ``create`` raises TritonModelException if the server has none."""

    def __init__(self) -> None:
        self._families: dict[str, Any] = {}

    def create(
        self, name: str, description: str, labels: Mapping[str, str], *, counter: bool
    ) -> Metric:
        """Return a new metric in the family ``name``."""
        if name not in self._families:
            kind = pb_utils.MetricFamily.COUNTER if counter else pb_utils.MetricFamily.GAUGE
            self._families[name] = pb_utils.MetricFamily(
                name=name, description=description, kind=kind
            )
        metric: Metric = self._families[name].Metric(labels=dict(labels))
        return metric

    def add(self, metric: Metric, amount: float) -> None:
        """Raise a counter; a round trip."""
        metric.increment(amount)

    def set(self, metric: Metric, value: float) -> None:
        """Set a gauge; a round trip."""
        metric.set(value)

    def clear(self) -> None:
        """Drop the families. The server shows their metrics as long as they exist."""
        self._families.clear()


class Log:
    """Triton's log, with a prefix."""

    def __init__(self, name: str) -> None:
        self._prefix = f"[{name}] "

    def info(self, text: str) -> None:
        """Log an event of normal operation."""
        pb_utils.Logger.log_info(self._prefix + text)

    def warning(self, text: str) -> None:
        """Log something that an operator should look at."""
        pb_utils.Logger.log_warn(self._prefix + text)

    def error(self, text: str) -> None:
        """Log a failure."""
        pb_utils.Logger.log_error(self._prefix + text)
