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
# W3C allows a `tracestate` to be cut to this length.
LONGEST_HEADER = 512
"""The most characters of a trace header."""
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where POSIX shared memory lives on Linux
# For the responses of other threads, and for one step in which Triton's region grows.
MARGIN = 8 << 20
"""Bytes of shared memory that a response must leave free."""
# To use this up within `MOMENT_S`, responses would have to take 50 GB/s.
PLENTY = 1 << 30
"""Bytes of free shared memory with which ``MOMENT_S`` passes without another measurement."""
MOMENT_S = 0.02
"""How many seconds a measurement of free shared memory is used."""
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
# The error about a model that is not ready is another one: it has the model's name.
ENDING = "Server not ready"
"""The error of a stopping server about each of its models."""
# No model has an output of this name. So no server passes the question on to the model.
NO_OUTPUT = "server_ends"


def inputs(request: TritonRequest) -> Inputs:
    """Return the request's tensors by name."""
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}


def parameters(request: TritonRequest) -> str:
    """Return the request parameters as JSON text.

    Raises:
        InvalidRequestError: they are not UTF-8.
    """
    # Triton passes on the bytes of an HTTP body, and decodes them only in this call.
    try:
        return request.parameters()
    except UnicodeDecodeError:
        raise InvalidRequestError("the request parameters must be UTF-8 text") from None


def trace_headers(request: TritonRequest) -> dict[str, str]:
    """Return the request's trace as HTTP headers of W3C's trace context; empty without a trace.

    The server's own trace comes first (``--trace-config mode=opentelemetry``). Otherwise the
    headers are those that the frontends forward as parameters (``--http-header-forward-pattern``,
    ``--grpc-header-forward-pattern``).
    """
    # Older servers have no `trace`; 24.10 has it.
    context = request.trace().get_context() if hasattr(request, "trace") else None
    try:
        values = json.loads(context or request.parameters() or "{}")
    except (ValueError, RecursionError):
        # A request is answered without its trace, too.
        return {}
    if not isinstance(values, dict):
        return {}
    headers = {}
    for name, value in values.items():
        if name.lower() in TRACE and isinstance(value, str) and len(value) <= LONGEST_HEADER:
            headers[name.lower()] = value
    return headers


def timeout_us(request: TritonRequest) -> int:
    """Return the request's ``timeout`` parameter in microseconds; 0 if it has none."""
    # Triton keeps it apart from the other parameters. Older servers have no such method.
    return int(request.timeout()) if hasattr(request, "timeout") else 0


def unload(name: str) -> None:
    """Ask the server to unload a model; returns at once."""
    pb_utils.unload_model(name)


def is_ending(name: str) -> bool:
    """Return whether the server is stopping; a round trip.

    Args:
        name: this model's name.
    """
    # A question that finds no room in shared memory ends the stub.
    if not room.fits(0):
        return False
    # We ask the server for an answer of the model. The server refuses before the model sees the
    # request, because a decoupled model does not answer in this way. Since 26.03 the server may ask
    # the model's `is_ready` first. A stopping server answers nothing about its models, and its
    # error says so.
    #
    # `is_model_ready` would be a smaller question. But a stopping server answers it with an error,
    # and the stub reads the text of that error after it has let the server free it (24.10, and in
    # the sources of 2025). On a busy machine one stub in eighteen died of that. Its requests waited
    # for ever.
    request = pb_utils.InferenceRequest(
        model_name=name, requested_output_names=[NO_OUTPUT], inputs=[]
    )
    try:
        error = request.exec().error()
    except pb_utils.TritonModelException:
        # Triton takes no questions while it unloads the model.
        return False
    return error is not None and ENDING in error.message()


def shared_memory_free() -> int:
    """Return by how many bytes Triton's region of shared memory can grow; takes a microsecond."""
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize


class Room:
    """Decides whether a response fits in shared memory.

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
        # The system call releases Python's lock. With 128 requests in flight, getting the lock back
        # took a tenth of a sender's time. So we do not measure if `PLENTY` was free a moment ago.
        now = self._clock()
        if now < self._plenty_until and size < MARGIN:
            return True
        free = self._free()
        self._plenty_until = now + MOMENT_S if free > PLENTY else -math.inf
        return free > 2 * size + MARGIN


room = Room()


def _size(tensors: Tensors) -> int:
    size = 0
    for _, array in tensors:
        # For strings, `nbytes` counts the pointers only.
        size += sum(map(len, array)) if array.dtype == object else array.nbytes
    return size


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

        Args:
            tensors: the outputs with their names.
            final: whether it is the request's last response.
        """
        response = pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, array) for name, array in tensors]
        )
        # Triton's sender closes before it places a final response in shared memory. It takes
        # nothing after that. If the response did not fit, its client would wait for ever. So a
        # response that might not fit is sent without the flag, and the end follows alone.
        if final and room.fits(_size(tensors)):
            self._sender.send(response, FINAL)
            return
        self._sender.send(response, 0)
        if final:
            # This frees the shared memory of the response. The end then fits into it.
            del response
            self._sender.send(flags=FINAL)

    def send_error(self, error: AdapterError) -> None:
        """Send an error as the final response."""
        text, name = self._dialect.error(error)
        # The log goes through the shared memory, which may be full.
        with contextlib.suppress(Exception):
            self._dialect.log_error(self._log, text)
        # A code that this Triton does not have becomes UNKNOWN.
        code = getattr(pb_utils.TritonError, name, pb_utils.TritonError.UNKNOWN)
        response = pb_utils.InferenceResponse(error=pb_utils.TritonError(text, code))
        self._sender.send(response, FINAL)

    def is_cancelled(self) -> bool:
        """Return whether the client has cancelled the request or gone away; a round trip."""
        return bool(self._sender.is_cancelled())


class TritonMetrics:
    """Creates metrics in the server."""

    def __init__(self) -> None:
        self._families: dict[str, Any] = {}

    def create(
        self, name: str, description: str, labels: Mapping[str, str], *, counter: bool
    ) -> Metric:
        """Return a new metric in the family ``name``.

        Args:
            name: the family's name.
            description: the family's help text.
            labels: the metric's labels.
            counter: whether it is a counter. Otherwise it is a gauge.

        Raises:
            TritonModelException: the server has no metrics.
        """
        # Triton refuses a second family of the same name.
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
        """Drop the metrics."""
        # The server shows a metric as long as its family exists.
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
