"""Parse ``operator_request``, a request of an operator to the engine itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from triton_vllm.base.coerce import shown
from triton_vllm.base.document import json_object
from triton_vllm.base.errors import InvalidRequestError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Collection

INPUT_NAME = "operator_request"
# ``level`` may be left out, a name may not.
OPERATIONS: Mapping[str, tuple[str, ...]] = {
    "sleep": ("level",),
    "wake_up": (),
    "is_sleeping": (),
    "reset_prefix_cache": (),
    "load_lora": ("name",),
}
"""The operations that an operator may ask for, with their arguments."""


@dataclass(frozen=True)
class OperatorRequest:
    """A request for one of the ``OPERATIONS``; ``timeout`` is in microseconds, 0 means none."""

    operation: str
    arguments: Mapping[str, Any]
    timeout: int = 0


def parse(text: str, depth: int, allowed: Collection[str], timeout: int) -> OperatorRequest:
    """Return the parsed request.

    Args:
        text: a JSON object with ``operation`` and its arguments.
        depth: the most levels of JSON.
        allowed: OPERATOR_REQUESTS.
        timeout: the request's timeout in microseconds.

    Raises:
        InvalidRequestError: the request is malformed. The text lists the operations only if some
            operation is allowed.
        UnsupportedError: OPERATOR_REQUESTS does not allow it.
    """
    if not allowed:
        raise UnsupportedError(
            "this model takes no operator requests: "
            "OPERATOR_REQUESTS in its config.pbtxt lists none"
        )
    values = json_object(text, INPUT_NAME, depth)
    operation = values.pop("operation", None)
    if not isinstance(operation, str) or operation not in OPERATIONS:
        raise InvalidRequestError(f"{INPUT_NAME}.operation must be one of {', '.join(OPERATIONS)}")
    if operation not in allowed:
        raise UnsupportedError(
            f"{INPUT_NAME}: '{operation}' is not allowed: "
            "OPERATOR_REQUESTS in the model's config.pbtxt does not list it"
        )
    known = OPERATIONS[operation]
    for name, value in values.items():
        if name not in known:
            raise InvalidRequestError(
                f"{INPUT_NAME}: '{operation}' has no argument '{shown(name)}'"
            )
        _check_argument(name, value)
    if "name" in known and "name" not in values:
        raise InvalidRequestError(f"{INPUT_NAME}: '{operation}' needs the name of an adapter")
    return OperatorRequest(operation, values, timeout=timeout)


def _check_argument(name: str, value: Any) -> None:
    """Raise InvalidRequestError if the argument ``level`` or ``name`` has a wrong value."""
    # `type`, because True equals 1 in Python, and JSON has both. vLLM also has a level 2, which
    # drops the model's weights as well.
    if name == "level" and (type(value) is not int or value not in (0, 1)):
        raise InvalidRequestError(
            f"{INPUT_NAME}.level must be 0, which only pauses, "
            "or 1, which also frees the memory of the devices"
        )
    if name == "name" and not (isinstance(value, str) and value):
        raise InvalidRequestError(f"{INPUT_NAME}.name must be the name of an adapter")
