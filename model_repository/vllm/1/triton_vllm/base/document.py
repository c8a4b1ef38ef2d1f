"""Read a JSON document of a request within limits."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from triton_vllm.base.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# A grammar's compiler and torch take only these. The msgpack between vLLM's processes ends at 64
# bits as well.
INT64 = range(-(2**63), 2**63)
"""The integers that a request may contain."""
_JSON_NAMES = {
    list: "a list",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}


def json_object(text: str, name: str, depth: int, *, strict: bool = False) -> dict[str, Any]:
    """Return the JSON object in ``text``; arguments and errors are those of ``json_value``."""
    value = json_value(text, name, depth, strict=strict)
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{name} must be a JSON object, not {_JSON_NAMES[type(value)]}")
    return value


def json_value(text: str, name: str, depth: int, *, strict: bool = False) -> Any:
    r"""Return the JSON value in ``text``.

    Args:
        text: the document.
        name: the input's name for errors.
        depth: the most levels of lists and objects. 0 means no limit.
        strict: whether to refuse what parsers read in different ways: a name that an object has
            twice, and a number that is too large for a float.

    Raises:
        InvalidRequestError: the text is not valid JSON, is too deep, or has half of a character
            that needs two ("\ud800").
    """
    try:
        value = (_STRICT if strict else _USUAL).decode(text)
        # Only such an escape can make half a character. UTF-8 cannot encode it, so encoding the
        # value finds it.
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(
            f"{name} has a lone surrogate, which is half a character"
        ) from None
    except ValueError as error:
        raise InvalidRequestError(f"{name} is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequestError(f"{name} is nested too deeply") from None
    # Counting brackets is cheap, so it comes first. Most documents have fewer brackets than levels
    # are allowed.
    brackets = text.count("{") + text.count("[")
    if 0 < depth < brackets and _is_deeper(value, depth):
        raise InvalidRequestError(f"{name} is nested too deeply: at most {depth} levels are taken")
    return value


def _is_deeper(value: Any, depth: int) -> bool:
    """Return whether lists and objects are nested more than ``depth`` levels deep."""
    # Level by level, without recursion: a deep document must not exhaust the stack.
    level = [value]
    for _ in range(depth):
        level = list(_children(level))
        if not level:
            return False
    return any(isinstance(node, list | dict) for node in level)


def check_integers(value: Any, what: str) -> None:
    """Refuse integers of more than 64 bits, at any depth.

    Args:
        value: a value from JSON.
        what: the beginning of the sentence "… holds an integer of more than 64 bits".

    Raises:
        InvalidRequestError: there is such an integer.
    """
    level = [value]
    while level:
        if any(isinstance(node, int) and node not in INT64 for node in level):
            raise InvalidRequestError(f"{what} holds an integer of more than 64 bits")
        level = list(_children(level))


def _children(nodes: Iterable[Any]) -> Iterator[Any]:
    """Yield the values in the lists and objects among ``nodes``."""
    for node in nodes:
        if isinstance(node, dict):
            yield from node.values()
        elif isinstance(node, list):
            yield from node


def _no_constant(name: str) -> Any:
    # Python's JSON reader takes NaN and Infinity, which JSON does not have.
    raise ValueError(f"{name} is not a JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these names and values.

    Raises:
        ValueError: a name occurs twice.
    """
    value = dict(pairs)
    if len(value) < len(pairs):
        seen = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"an object has the name '{name[:64]}' twice")
            seen.add(name)
    return value


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:64]} is too large")
    return value


# `json.loads` would make a new decoder for each document.
_USUAL = json.JSONDecoder(parse_constant=_no_constant)
_STRICT = json.JSONDecoder(
    parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_unique
)
