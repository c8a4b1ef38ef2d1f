"""Stands for `triton_python_backend_utils`, which only tritonserver's stub has, in unit tests of the model."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

CODES = ("UNKNOWN", "INTERNAL", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "CANCELLED")
FINAL = 1
REFUSAL = "Model mine - Error when running inference: Model mine is using the decoupled. The current BLS request call doesn't"


class TritonModelException(Exception):  # noqa: N818 - Triton's name
    """Raised by calls to the server."""


class Tensor:
    """A named array."""

    def __init__(self, name: str, array: Any) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self._array


class TritonError:
    """A message with a code; the codes are attributes, as in Triton."""

    def __init__(self, message: str, code: Any = "INTERNAL") -> None:
        self.message, self.code = message, code


for _code in CODES:
    setattr(TritonError, _code, _code)


class InferenceResponse:
    """Output tensors, or an error."""

    def __init__(self, output_tensors: Any = (), error: Any = None) -> None:
        self.output_tensors, self.error = output_tensors, error


class Logger:
    """Keeps what is logged; `lines` is emptied by the fixture."""

    lines: list[tuple[str, str]] = []  # noqa: RUF012 - Triton's logger is one for the process, too

    @classmethod
    def log_info(cls, text: str) -> None:
        cls.lines.append(("info", text))

    @classmethod
    def log_warn(cls, text: str) -> None:
        cls.lines.append(("warning", text))

    @classmethod
    def log_error(cls, text: str) -> None:
        cls.lines.append(("error", text))


class Metric:
    """A value with labels."""

    def __init__(self, labels: dict[str, str]) -> None:
        self.labels, self.value = labels, 0.0

    def increment(self, amount: float) -> None:
        self.value += amount

    def set(self, value: float) -> None:
        self.value = value


class MetricFamily:
    """Makes metrics; Triton refuses a second family of the same name while the first one lives."""

    COUNTER, GAUGE = "counter", "gauge"

    def __init__(self, name: str, description: str, kind: str) -> None:
        self.name, self.description, self.kind = name, description, kind
        self.metrics: list[Metric] = []

    def Metric(self, labels: dict[str, str]) -> Metric:  # noqa: N802 - Triton's name
        self.metrics.append(Metric(labels))
        return self.metrics[-1]


class ResponseSender:
    """Keeps each response with its flags, and refuses any after the final one, as Triton does."""

    def __init__(self) -> None:
        self.sent: list[tuple[InferenceResponse, int]] = []
        self.cancelled = False
        self._closed = False

    def send(self, response: Any = None, flags: int = 0) -> None:
        if self._closed:
            raise RuntimeError("response sender has been closed")
        self._closed = flags == FINAL
        self.sent.append((response or InferenceResponse(), flags))

    def told(self) -> list[InferenceResponse]:
        """Return the responses, without a final flag that was sent alone."""
        return [response for response, _ in self.sent if response.error or response.output_tensors]

    def is_cancelled(self) -> bool:
        if self.sent and self.sent[-1][1] == FINAL:
            raise AssertionError("tritonserver crashes here")
        return self.cancelled


class Request:
    """One request: tensors by name, its parameters as JSON, Triton's timeout in microseconds."""

    trace: Callable[[], Any]  # not all have it

    def __init__(self, tensors: dict[str, Any], parameters: str = "", timeout: int = 0) -> None:
        self.sender = ResponseSender()
        self._tensors, self._parameters, self._timeout = tensors, parameters, timeout

    def inputs(self) -> list[Tensor]:
        return [Tensor(name, array) for name, array in self._tensors.items()]

    def parameters(self) -> str:
        return self._parameters

    def timeout(self) -> int:
        return self._timeout

    def get_response_sender(self) -> ResponseSender:
        return self.sender


def install() -> ModuleType:
    """Put the module where `import` finds it, once in a process, and return it."""
    found = sys.modules.get("triton_python_backend_utils")
    if hasattr(found, "fakes"):
        return found  # type: ignore[return-value]  # what has imported it keeps it
    module: Any = ModuleType("triton_python_backend_utils")
    module.unloaded = []
    module.refusal, module.trouble = REFUSAL, None

    class InferenceRequest:
        """A model's request to the server, answered by an error: refused, or the server's end, or what `trouble` raises."""

        def __init__(self, model_name: str, requested_output_names: list[str], inputs: list[Any]) -> None:
            assert model_name
            assert set(requested_output_names).isdisjoint({"text_output"})  # else the model would be asked
            assert not inputs

        def exec(self) -> SimpleNamespace:
            if module.trouble is not None:
                raise module.trouble
            error = SimpleNamespace(message=lambda: module.refusal) if module.refusal else None
            return SimpleNamespace(error=lambda: error)

    def is_model_ready(model_name: str) -> bool:
        raise AssertionError(f"the stub crashes here when the server of {model_name} ends")

    vars(module).update(
        is_model_ready=is_model_ready, InferenceRequest=InferenceRequest, TritonModelException=TritonModelException,
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL, Tensor=Tensor, TritonError=TritonError, Logger=Logger,
        InferenceResponse=InferenceResponse, MetricFamily=MetricFamily, unload_model=module.unloaded.append,
        fakes=SimpleNamespace(Request=Request),
    )  # fmt: skip
    sys.modules["triton_python_backend_utils"] = module
    return module
