"""Embedding and pooling requests: vLLM's PoolingParams in, JSON numbers out."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from triton_vllm.coerce import closest, coerce
from triton_vllm.delivery.response import Tensors, texts
from triton_vllm.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from triton_vllm.admission.parse import EmbedRequest, Wants

INTERNAL = frozenset({"task", "requires_token_ids", "extra_kwargs", "output_kind", "late_interaction_params"})


def build(make: Any, types: Mapping[str, Any], refusals: tuple[type[Exception], ...], request: EmbedRequest) -> Any:
    """Return PoolingParams for a request.

    Args:
        make: vLLM's PoolingParams.
        types: its parameters with their declared types.
        refusals: exceptions by which vLLM says that a value is wrong.
        request: the parsed request.

    Raises:
        InvalidRequestError: unknown parameter, wrong type or a value that vLLM refuses.
    """
    known = [name for name in types if name not in INTERNAL]
    values: dict[str, Any] = {}
    for name, value in request.parameters.items():
        if name not in known:
            raise InvalidRequestError(f"unknown pooling parameter '{name}'{closest(name, known)}")
        try:
            values[name] = coerce(value, types[name])
        except ValueError as error:
            raise InvalidRequestError(f"pooling parameter '{name}' {error}") from None
    try:
        return make(task=request.task, **values)
    except refusals as error:
        raise InvalidRequestError(f"pooling parameters: {str(error).strip()}") from None


class PoolingAssembler:
    """Makes the one response of a pooling request."""

    def __init__(self, wants: Wants) -> None:
        self._wants = wants

    def build(self, outputs: Sequence[Any]) -> Tensors:
        """Return the tensors (name, array): the pooled numbers as JSON, nested as the model's task has them."""
        last = outputs[-1]
        tensors: Tensors = [("text_output", texts(json.dumps(last.outputs.data.tolist())))]
        if self._wants.num_input_tokens:
            tensors.append(("num_input_tokens", np.array([len(last.prompt_token_ids)], np.uint32)))
        if self._wants.num_output_tokens:
            tensors.append(("num_output_tokens", np.array([0], np.uint32)))
        return tensors
