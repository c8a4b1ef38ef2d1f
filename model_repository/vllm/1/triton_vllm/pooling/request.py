"""Turn the pooling parameters of an embedding request into vLLM's PoolingParams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triton_vllm.base.coerce import closest, coerce, shown
from triton_vllm.base.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from triton_vllm.pooling.embedding import EmbedRequest

# Not for clients to choose: the adapter sets `task`, and vLLM sets the others.
INTERNAL_PARAMETERS = frozenset(
    {"task", "requires_token_ids", "extra_kwargs", "output_kind", "late_interaction_params"}
)


def build(
    make: Any,
    types: Mapping[str, Any],
    refusals: tuple[type[Exception], ...],
    request: EmbedRequest,
) -> Any:
    """Return PoolingParams for a request.

    Args:
        make: vLLM's PoolingParams.
        types: its parameters with their declared types.
        refusals: vLLM's exceptions for wrong values.
        request: the parsed request.

    Raises:
        InvalidRequestError: a parameter is unknown or of the wrong type, or vLLM refuses its value.
    """
    known = [name for name in types if name not in INTERNAL_PARAMETERS]
    values: dict[str, Any] = {}
    for name, value in request.parameters.items():
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
        return make(task=request.task, **values)
    except refusals as error:
        raise InvalidRequestError(f"pooling parameters: {str(error).strip()}") from None
