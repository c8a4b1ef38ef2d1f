"""Turn the pooling parameters of an embedding request into vLLM's PoolingParams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triton_vllm.base.coerce import closest, coerce, shown
from triton_vllm.base.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from triton_vllm.vllm_api import Vllm

# Not for clients to choose: the adapter sets `task`, and vLLM sets the others.
INTERNAL_PARAMETERS = frozenset(
    {"task", "requires_token_ids", "extra_kwargs", "output_kind", "late_interaction_params"}
)


def build(vllm: Vllm, types: Mapping[str, Any], task: str, parameters: Mapping[str, Any]) -> Any:
    """Return PoolingParams for a request.

    Args:
        vllm: the loaded vLLM.
        types: its pooling parameters with their declared types.
        task: the pooling task.
        parameters: the request's parameters.

    Raises:
        InvalidRequestError: a parameter is unknown or of the wrong type, or vLLM refuses its value.
    """
    known = [name for name in types if name not in INTERNAL_PARAMETERS]
    values: dict[str, Any] = {}
    for name, value in parameters.items():
        # Ignoring a misspelt name would change the answer without a word.
        if name not in known:
            raise InvalidRequestError(
                f"unknown pooling parameter '{shown(name)}'{closest(name, known)}"
            )
        try:
            # A number may come as a string.
            values[name] = coerce(value, types[name])
        except ValueError as error:
            raise InvalidRequestError(f"pooling parameter '{name}' {error}") from None
    try:
        return vllm.PoolingParams(task=task, **values)
    except vllm.client_errors as error:
        raise InvalidRequestError(f"pooling parameters: {str(error).strip()}") from None
