"""The only module that talks to Triton: reads requests, sends responses, logs."""

from __future__ import annotations

import contextlib
import json
import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import triton_python_backend_utils as pb_utils

from triton_vllm.base.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from triton_vllm.base import protocols
    from triton_vllm.base.dialect import Dialect
    from triton_vllm.base.errors import AdapterError
    from triton_vllm.base.protocols import Inputs, Metric, Tensors, TritonRequest
    from triton_vllm.base.refusals import Refusals

TRACE = ("traceparent", "tracestate")
# W3C allows a `tracestate` to be cut to this length.
LONGEST_HEADER_CHARACTERS = 512
"""The most characters of a trace header."""
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where POSIX shared memory lives on Linux
# For the responses of other threads, and for one step in which Triton's region grows.
MARGIN_BYTES = 8 << 20
"""Free shared memory without which the server is asked nothing."""
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
# Triton's gRPC front end loses track of a request if the client leaves while it handles the final
# flag: the model can then never be unloaded. With the flag on the last response, that hit clients
# that leave at the flag; with the flag right after it, clients that leave at the last response.
# Both happened to a model of 20 lines without vLLM, on Triton 24.10, each time that 320 streams
# were left. A client that leaves at once is gone after this pause. With 1 ms, all of 6 unloads of
# that model hung; with 5 ms 3 of 5; with 10 or 20 ms none of 14, next to busy processes, too.
LONGEST_S = 0.02
"""The longest pause between a request's last response and its final flag, s."""
SHORTEST_S = 0.01
"""The shortest pause of a stream, s."""
# Over HTTP, a whole answer is complete with the flag, and a client that sends one request after the
# other waits for the end of a stream.
SHARE = 0.01
"""The share of an answer's time that the pause may take, from the shortest pause on."""
# Clients may ask Triton for gRPC's status of an error (the header `triton_grpc_error`). Before
# 26.04 its front end then frees what the flag needs when the error comes: a flag of its own ended
# the server with signal 11 (24.10, 15 of 15 refused requests). The sources of 26.04 keep it.
# Together they still ended it in 9 of 23 runs of up to 60 refused requests, and in 5 of 11 with a
# model of 20 lines without vLLM. A refusal is ready at once, while the front end still works on the
# request. With an error 10 to 30 ms after its request, none of 21 runs ended so.
ERRORS_APART_SINCE = "26.04"
"""The first release of Triton to which an error and the final flag may go apart."""
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
        is_short_text = isinstance(value, str) and len(value) <= LONGEST_HEADER_CHARACTERS
        if name.lower() in TRACE and is_short_text:
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
    if shared_memory_free() <= MARGIN_BYTES:
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


class Channel:
    """The response sender of one request; ``reply.reply`` knows when each method may be called.

    Args:
        request: Triton's request.
        dialect: determines the text and code of errors, and logs them.
        log: the model's log.
        later: calls a function in so many seconds.
        errors_apart: whether the server takes an error and the final flag apart.
        refusals: counts the errors.
    """

    __slots__ = (
        "_came", "_dialect", "_ending", "_errors_apart", "_later", "_log", "_refusals", "_sender",
    )  # fmt: skip

    def __init__(
        self,
        request: TritonRequest,
        dialect: Dialect,
        log: protocols.Log,
        later: Callable[[Callable[[], None], float], None],
        *,
        errors_apart: bool,
        refusals: Refusals,
    ) -> None:
        self._sender = request.get_response_sender()
        self._dialect = dialect
        self._log = log
        self._later = later
        self._errors_apart = errors_apart
        self._refusals = refusals
        # Whether the final flag has been scheduled: a second one would be an error.
        self._ending = False
        # when the request came
        self._came = time.monotonic()

    def send(self, tensors: Tensors, *, final: bool, whole: bool = False) -> None:
        """Send one response; blocks until the server has confirmed it.

        Args:
            tensors: the outputs with their names.
            final: whether it is the request's last response. The final flag follows later.
            whole: whether the client may wait for the flag before it reads the answer.
        """
        response = pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, array) for name, array in tensors]
        )
        self._sender.send(response, 0)
        if final:
            share_s = SHARE * (time.monotonic() - self._came)
            shortest_s = 0.0 if whole else SHORTEST_S
            self._end(response, min(LONGEST_S, max(share_s, shortest_s)))

    def send_error(self, error: AdapterError) -> None:
        """Send an error as the final response, and count and log it.

        If the server does not take error and final flag apart, they are sent together, a little
        later. Otherwise the flag follows.
        """
        self._refusals.note(error)
        text, name = self._dialect.error(error)
        # The log goes through the shared memory, which may be full.
        with contextlib.suppress(Exception):
            self._dialect.log_error(self._log, text)
        # A code that this Triton does not have becomes UNKNOWN.
        code = getattr(pb_utils.TritonError, name, pb_utils.TritonError.UNKNOWN)
        response = pb_utils.InferenceResponse(error=pb_utils.TritonError(text, code))
        if self._errors_apart:
            self._send_then_end(response)
        elif not self._ending:
            self._ending = True
            # Not sooner after the request than this, see ERRORS_APART_SINCE.
            pause_s = max(0.0, LONGEST_S - (time.monotonic() - self._came))
            self._later(partial(self._send_with_flag, response), pause_s)

    def _send_with_flag(self, response: Any) -> None:
        """Send an error and the final flag together; if memory is short, one after the other."""
        # A sender closes before it places a final response in shared memory. If the error did not
        # fit, its client would wait for ever.
        if shared_memory_free() > MARGIN_BYTES:
            self._sender.send(response, FINAL)
        else:
            self._ending = False
            self._send_then_end(response)

    def _send_then_end(self, response: Any) -> None:
        """Send an error, then the final flag after a pause."""
        try:
            self._sender.send(response, 0)
        finally:
            # Without an end, a client would wait for ever for an error that does not fit.
            self._end(response, LONGEST_S)

    def _end(self, last: Any, pause_s: float) -> None:
        """Send the final flag, alone, after a pause; ``last`` is the last response."""
        if not self._ending:
            self._ending = True
            # The last response keeps its shared memory until then, so that the flag finds room.
            self._later(partial(self._send_flag, [last]), pause_s)

    def _send_flag(self, held: list[Any]) -> None:
        # The list had the only reference to the last response. This frees its shared memory.
        held.clear()
        self._sender.send(flags=FINAL)

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
