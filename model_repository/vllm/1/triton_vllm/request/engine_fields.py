"""Fields of `sampling_parameters` that are not about sampling: for vLLM's scheduler, its caches, and other engines.

`cache_salt` is anybody's; the others reach other requests or other machines, and the operator allows them by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triton_vllm.base.document import check_integers, json_value
from triton_vllm.base.errors import InvalidRequestError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Collection

ENGINE_FIELDS = ("extra_args", "kv_transfer_params", "session_id", "data_parallel_rank")
"""What else vLLM takes with a request, if the operator allows it."""
LONGEST = 256
"""Characters of `cache_salt` and `session_id`: a digest or a name."""
_TRANSFER = "kv_transfer_params"
_OBJECTS = ("extra_args", _TRANSFER)


def cache_salt(values: dict[str, Any]) -> str | None:
    """Remove and return the salt of the prefix cache: requests share cached prefixes only with those of the same one.

    Raises:
        InvalidRequestError: it is no string, empty or too long.
    """
    salt = values.pop("cache_salt", None)
    return None if salt is None else _string("cache_salt", salt)


def take(values: dict[str, Any], allowed: Collection[str], depth: int) -> dict[str, Any]:
    """Remove and return the fields that are there.

    Args:
        values: the parameters; changed.
        allowed: ALLOWED_REQUEST_FIELDS.
        depth: most levels of JSON.

    Raises:
        UnsupportedError: the operator has not allowed one.
        InvalidRequestError: a value is of the wrong type.
    """
    found = {name: values.pop(name) for name in ENGINE_FIELDS if name in values}
    for name, value in found.items():
        if name not in allowed:
            raise UnsupportedError(
                f"sampling parameter '{name}' is not allowed: ALLOWED_REQUEST_FIELDS in the model's config.pbtxt does not list it"
            )
        found[name] = _object(name, value, depth) if name in _OBJECTS else _plain(name, value)
    if _TRANSFER in found.get("extra_args", {}) and _TRANSFER not in allowed:  # vLLM takes it from there, too
        raise UnsupportedError(
            f"sampling parameter 'extra_args' must not have {_TRANSFER}, which ALLOWED_REQUEST_FIELDS does not list"
        )
    return found


def _object(name: str, value: Any, depth: int) -> dict[str, Any]:
    made = json_value(value, name, depth) if isinstance(value, str) else value
    if not isinstance(made, dict):
        raise InvalidRequestError(f"sampling parameter '{name}' must be an object")
    check_integers(made, f"sampling parameter '{name}'")
    return made


def _plain(name: str, value: Any) -> int | str:
    if name == "session_id":
        return _string(name, value)
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise InvalidRequestError(f"sampling parameter '{name}' must be the number of an engine, from 0 on")
    return value


def _string(name: str, value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST:
        raise InvalidRequestError(f"sampling parameter '{name}' must be a string of 1 to {LONGEST} characters")
    return value
