"""Read the fields of ``sampling_parameters`` that are not about sampling.

They are for vLLM's scheduler, its caches and other engines.

Any client may use ``cache_salt``. The other fields affect other requests or other machines, so the
operator allows them by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triton_vllm.base.document import check_integers, json_value
from triton_vllm.base.errors import InvalidRequestError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Collection

ENGINE_FIELDS = ("extra_args", "kv_transfer_params", "session_id", "data_parallel_rank")
"""The other fields that vLLM takes with a request, if the operator allows them."""
LONGEST = 256
"""The most characters of ``cache_salt`` and ``session_id``, which are a digest or a name."""
_TRANSFER = "kv_transfer_params"
_OBJECTS = ("extra_args", _TRANSFER)


def take_cache_salt(values: dict[str, Any]) -> str | None:
    """Remove and return the salt of the prefix cache.

    Raises:
        InvalidRequestError: the salt is not a string, is empty or too long.
    """
    # Requests share cached prefixes only if their salts are equal. A wrong salt harms only the
    # request itself, so no permission is needed.
    salt = values.pop("cache_salt", None)
    return None if salt is None else _string("cache_salt", salt)


def take(values: dict[str, Any], allowed: Collection[str], depth: int) -> dict[str, Any]:
    """Remove and return the fields of the request.

    Args:
        values: the parameters. Changed in place.
        allowed: ALLOWED_REQUEST_FIELDS.
        depth: the most levels of JSON.

    Raises:
        UnsupportedError: the operator has not allowed a field.
        InvalidRequestError: a value has the wrong type.
    """
    fields: dict[str, Any] = {}
    for name in ENGINE_FIELDS:
        if name not in values:
            continue
        if name not in allowed:
            raise UnsupportedError(
                f"sampling parameter '{name}' is not allowed: "
                "ALLOWED_REQUEST_FIELDS in the model's config.pbtxt does not list it"
            )
        value = values.pop(name)
        if name in _OBJECTS:
            fields[name] = _object(name, value, depth)
        elif name == "session_id":
            fields[name] = _string(name, value)
        else:
            fields[name] = _engine_number(name, value)
    # vLLM would read it from there, too.
    has_inner_transfer = _TRANSFER in fields.get("extra_args", ())
    if has_inner_transfer and _TRANSFER not in allowed:
        raise UnsupportedError(
            f"sampling parameter 'extra_args' must not have {_TRANSFER}, "
            "which ALLOWED_REQUEST_FIELDS does not list"
        )
    return fields


def _object(name: str, value: Any, depth: int) -> dict[str, Any]:
    """Return an object with at most ``depth`` levels; ``value`` may be a string with its JSON."""
    fields = json_value(value, name, depth) if isinstance(value, str) else value
    if not isinstance(fields, dict):
        raise InvalidRequestError(f"sampling parameter '{name}' must be an object")
    # vLLM sends the object to EngineCore by msgpack, which has no larger integers.
    check_integers(fields, f"sampling parameter '{name}'")
    return fields


def _engine_number(name: str, value: Any) -> int:
    # `type`, because a boolean is an integer in Python.
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise InvalidRequestError(
            f"sampling parameter '{name}' must be the number of an engine, from 0 on"
        )
    return value


def _string(name: str, value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST:
        raise InvalidRequestError(
            f"sampling parameter '{name}' must be a string of 1 to {LONGEST} characters"
        )
    return value
