"""Read which arguments and parameters the installed vLLM takes, with their types."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import typing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from triton_vllm.vllm_api.names import Vllm


@dataclass(frozen=True)
class Schema:
    """What the installed vLLM's SamplingParams takes.

    Attributes:
        types: each parameter's declared type.
        make: SamplingParams itself.
        structured: the class of constraints.
        structured_name: the parameter for ``structured``.
        streaming: the output kind of streamed answers.
        whole: the output kind of whole answers.
        refusals: vLLM's exceptions for wrong values.
        fixed: parameters that every request gets.
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
    return dataclass_types(vllm.AsyncEngineArgs)


def dataclass_types(cls: Any) -> dict[str, Any]:
    """Return the fields of a dataclass of vLLM's, each with its declared type."""
    return _types(cls, [argument.name for argument in dataclasses.fields(cls)])


def sampling_schema(vllm: Vllm) -> Schema:
    """Return the description of this vLLM's SamplingParams."""
    types = _types(vllm.SamplingParams, vllm.SamplingParams.__struct_fields__)
    # The object belongs to one request, so vLLM need not copy it (since 0.14).
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
    """Return the keyword arguments of this vLLM's ``add_request``."""
    return inspect.signature(vllm.AsyncLLM.add_request).parameters.keys()


def pooling_types(vllm: Vllm) -> dict[str, Any]:
    """Return the pooling parameters that this vLLM takes, each with its declared type."""
    return _types(vllm.PoolingParams, vllm.PoolingParams.__struct_fields__)


def _types(cls: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return the public ones of the fields ``names`` of a class, with their types."""
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        # Most of vLLM's annotations are strings. They are valid in the module of the class that
        # declares them.
        module = vars(sys.modules.get(base.__module__, typing))
        for name, hint in inspect.get_annotations(base).items():
            hints[name] = _resolve(hint, module)
    return {name: hints.get(name, Any) for name in names if not name.startswith("_")}


def _resolve(hint: Any, namespace: Mapping[str, Any]) -> Any:
    """Return the type that an annotation stands for; Any if it cannot be evaluated.

    Args:
        hint: a type, or an annotation as a string.
        namespace: the names of the module that has the annotation.
    """
    if not isinstance(hint, str):
        return hint
    # Python evaluates the annotations of a class, not single ones.
    holder = type("_", (), {"__annotations__": {"x": hint}})
    try:
        return typing.get_type_hints(holder, dict(namespace))["x"]
    except Exception:  # noqa: BLE001
        # An annotation may name something that only type checkers import. A value of the type Any
        # is not checked.
        return Any
