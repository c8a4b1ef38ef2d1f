"""Read a JSON document of a request within limits."""

from __future__ import annotations

import json
from typing import Any

from triton_vllm.base.errors import InvalidRequestError

_JSON_NAMES = {
    list: "a list",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}


def json_object(text: str, name: str, depth: int) -> dict[str, Any]:
    """Return the JSON object in ``text``; ``name`` is the input for errors, ``depth`` the most levels."""
    value = json_value(text, name, depth)
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{name} must be a JSON object, not {_JSON_NAMES[type(value)]}")
    return value


def json_value(text: str, name: str, depth: int) -> Any:
    r"""Return the JSON value in ``text``.

    Args:
        text: the document.
        name: the input's name for errors.
        depth: the most levels of lists and objects. 0 means no limit.

    Raises:
        InvalidRequestError: not valid JSON, too deep, or half of a character that needs two
            ("\ud800").
    """
    try:
        value = json.loads(text, parse_constant=_no_constant)
        # Only such an escape can make half a character. Encoding the value finds it.
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(f"{name} has a lone surrogate, which is no character") from None
    except ValueError as error:
        raise InvalidRequestError(f"{name} is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequestError(f"{name} is nested too deeply") from None
    # Most documents have fewer brackets than levels are allowed. Counting brackets is cheap, so it
    # comes first.
    if 0 < depth < text.count("{") + text.count("[") and is_deeper(value, depth):
        raise InvalidRequestError(f"{name} is nested too deeply: at most {depth} levels are taken")
    return value


def is_deeper(value: Any, depth: int) -> bool:
    """Return whether lists and objects are nested more than ``depth`` levels deep."""
    # level by level, without recursion: a deep document must not exhaust the stack
    level = [value] if isinstance(value, list | dict) else []
    for _ in range(depth):
        inner = [
            child for node in level for child in (node.values() if isinstance(node, dict) else node)
        ]
        level = [child for child in inner if isinstance(child, list | dict)]
        if not level:
            return False
    return bool(level)


def check_integers(value: Any, what: str) -> None:
    """Refuse integers of more than 64 bits, at any depth.

    Neither msgpack, by which vLLM's processes talk, nor a grammar's compiler can hold them.

    Args:
        value: a value from JSON.
        what: begins the sentence "… holds an integer of more than 64 bits".

    Raises:
        InvalidRequestError: there is such an integer.
    """
    level = [value]
    while level:
        if any(isinstance(node, int) and not -(2**63) <= node < 2**63 for node in level):
            raise InvalidRequestError(f"{what} holds an integer of more than 64 bits")
        inner = (
            node.values() if isinstance(node, dict) else node
            for node in level
            if isinstance(node, dict | list)
        )
        level = [child for children in inner for child in children]


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
