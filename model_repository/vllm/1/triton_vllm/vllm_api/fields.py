"""What the engine arguments, sampling and pooling parameters of the installed vLLM are, with their types."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import typing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from triton_vllm.vllm_api.parts import Vllm


@dataclass(frozen=True)
class Schema:
    """What the installed vLLM's SamplingParams takes.

    `types` maps a parameter to its declared type; `make`, `structured`, `streaming` and `whole` are vLLM's classes and
    output kinds, handed in so that this module needs no vLLM. `structured_name` is the parameter for `structured`;
    `refusals` are the exceptions by which vLLM says that a value is wrong.
    """

    types: Mapping[str, Any]
    make: Any
    structured: Any
    structured_name: str
    streaming: Any
    whole: Any
    refusals: tuple[type[Exception], ...] = (ValueError, TypeError)
    fixed: Mapping[str, Any] = field(default_factory=dict)


def engine_arg_types(vllm: Vllm) -> dict[str, Any]:
    """Return the engine arguments that this vLLM takes, each with its declared type."""
    return _types(vllm.AsyncEngineArgs, [f.name for f in dataclasses.fields(vllm.AsyncEngineArgs)])


def sampling_schema(vllm: Vllm) -> Schema:
    """Describe SamplingParams of this vLLM."""
    types = _types(vllm.SamplingParams, list(vllm.SamplingParams.__struct_fields__))
    # skip_clone: the object belongs to one request, so vLLM need not copy it (since 0.14)
    fixed = {"skip_clone": True} if "skip_clone" in types else {}
    return Schema(
        types=types,
        make=vllm.SamplingParams,
        structured=vllm.StructuredOutputsParams,
        structured_name="structured_outputs",
        streaming=vllm.RequestOutputKind.DELTA,
        whole=vllm.RequestOutputKind.FINAL_ONLY,
        refusals=vllm.client_errors,
        fixed=fixed,
    )


def request_keywords(vllm: Vllm) -> Collection[str]:
    """Return the keyword arguments that this vLLM's `add_request` takes."""
    return inspect.signature(vllm.AsyncLLM.add_request).parameters.keys()


def pooling_types(vllm: Vllm) -> dict[str, Any]:
    """Return the pooling parameters that this vLLM takes, each with its declared type."""
    return _types(vllm.PoolingParams, list(vllm.PoolingParams.__struct_fields__))


def _types(cls: Any, names: list[str]) -> dict[str, Any]:
    """Map public field names to types; a type that cannot be resolved is Any, which is then not checked."""
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        module = vars(sys.modules.get(base.__module__, typing))
        for name, hint in inspect.get_annotations(base).items():
            hints[name] = _resolve(hint, module)
    return {name: hints.get(name, Any) for name in names if not name.startswith("_")}


def _resolve(hint: Any, namespace: Mapping[str, Any]) -> Any:
    if not isinstance(hint, str):
        return hint
    try:
        return typing.get_type_hints(type("_", (), {"__annotations__": {"x": hint}}), dict(namespace))["x"]
    except Exception:  # noqa: BLE001 - an annotation may name whatever is imported for type checkers only
        return Any
