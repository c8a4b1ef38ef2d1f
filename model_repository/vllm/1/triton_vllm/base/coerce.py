"""Convert JSON values to the types that vLLM declares, and refuse values that do not fit.

Old files and clients such as genai-perf write numbers and booleans as strings ("100", "true"). vLLM
would take "false" as true. It checks few types itself, and fails later and less clearly.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import json
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Union

from triton_vllm.base.document import INT64

# A longer name is not a misspelling of one of ours.
LONG_NAME = 60
"""Characters of a client's value that an error repeats."""
_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")
_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a finite number",
    str: "a string",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


def coerce(value: Any, hint: Any) -> Any:  # noqa: PLR0911 - a table of cases reads best as one
    """Return ``value`` as the type ``hint``; a type that is not known here leaves it as it is.

    Raises:
        ValueError: the value does not fit. The text completes the sentence "name must be …".
    """
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return coerce(value, typing.get_args(hint)[0])
    if origin in (Union, types.UnionType):
        return _union(value, typing.get_args(hint))
    if origin is typing.Literal:
        return _literal(value, typing.get_args(hint))
    kind = origin or hint
    if kind in _SIMPLE:
        return _SIMPLE[kind](value)
    if kind in _SEQUENCES:
        return _sequence(value, kind, typing.get_args(hint))
    if kind is dict or (isinstance(kind, type) and issubclass(kind, Mapping)):
        return _mapping(value, typing.get_args(hint))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _enum(value, kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _record(value, kind)
    return value


def closest(name: str, known: Iterable[str]) -> str:
    """Return ", did you mean 'x'?" for the known name most like ``name``, or an empty string."""
    # The time of the search grows faster than the length of the name.
    if len(name) > LONG_NAME:
        return ""
    matches = difflib.get_close_matches(name, known, n=1)
    return f", did you mean '{matches[0]}'?" if matches else ""


def shown(value: str) -> str:
    """Return a client's text for an error, cut to ``LONG_NAME`` characters."""
    return value if len(value) <= LONG_NAME else value[: LONG_NAME - 3] + "..."


def to_bool(value: Any) -> bool:
    """Return a boolean from true, false, 1, 0 or a string that spells one.

    Raises:
        ValueError: the value is something else.
    """
    # A boolean is an integer in Python. Its string is "True" or "False".
    word = str(value).strip().lower() if isinstance(value, str | int) else ""
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise _wrong(value, bool)


def to_int(value: Any) -> int:
    """Return a 64-bit integer from an integer, a float without fraction, or a string of one.

    Raises:
        ValueError: the value is something else, such as a boolean.
    """
    if isinstance(value, str):
        try:
            # "100.0" and "1e3" are integers as well.
            value = float(value) if set(value) & set(".eE") else int(value)
        except ValueError:
            raise _wrong(value, int) from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(value, int)
    # `is_integer` is false for NaN and infinity.
    if isinstance(value, float) and not value.is_integer():
        raise _wrong(value, int)
    number = int(value)
    if number not in INT64:
        raise ValueError("must be an integer of 64 bits")
    return number


def to_float(value: Any) -> float:
    """Return a finite float from a number or a string of one.

    Raises:
        ValueError: the value is something else, such as a boolean.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _wrong(value, float)
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise _wrong(value, float) from None
    if not math.isfinite(number):
        raise _wrong(value, float)
    return number


def to_none(value: Any) -> None:
    """Return None.

    Raises:
        ValueError: the value is something else.
    """
    if value is not None:
        raise _wrong(value, type(None))


def to_str(value: Any) -> str:
    """Return a string.

    Raises:
        ValueError: the value is something else.
    """
    if not isinstance(value, str):
        raise _wrong(value, str)
    return value


_SIMPLE: dict[Any, Callable[[Any], Any]] = {
    bool: to_bool,
    int: to_int,
    float: to_float,
    str: to_str,
    type(None): to_none,
}
_SEQUENCES = (list, set, tuple, Iterable, Sequence)


def _wrong(value: Any, kind: type) -> ValueError:
    """Return the error about a value that is not of the type ``kind``."""
    return ValueError(f"must be {_NAMES[kind]}, not {_json(value)}")


def _json(value: Any) -> str:
    """Return a value as JSON for an error, cut to ``LONG_NAME`` characters."""
    # Cut before it is written as JSON, too, because a client's value may be huge.
    if isinstance(value, str | list):
        value = value[:LONG_NAME]
    return shown(json.dumps(value, default=str))


def _union(value: Any, members: tuple[Any, ...]) -> Any:
    """Return a value as the first of the types ``members`` that it fits.

    Raises:
        ValueError: it fits none of them.
    """
    if value is None and type(None) in members:
        return None
    candidates = [m for m in members if m is not type(None)]
    # The type that the value already has goes first. Otherwise a string such as "1" would become a
    # number where a string is allowed, too.
    exact = [m for m in candidates if (typing.get_origin(m) or m) is type(value)]
    others = [m for m in candidates if m not in exact]
    problems = []
    for member in exact + others:
        try:
            return coerce(value, member)
        except ValueError as error:
            problems.append(error)
    # The first type is the one that fits best, so its error is the most useful.
    raise problems[0]


def _literal(value: Any, choices: tuple[Any, ...]) -> Any:
    """Return the one of ``choices`` that a value is, or whose string it is.

    Raises:
        ValueError: it is none of them.
    """
    for choice in choices:
        # The type must match as well: in Python, True equals 1.
        if value == choice and type(value) is type(choice):
            return choice
    # Old clients write numbers as strings, so "1" also means 1.
    for choice in choices:
        if str(value) == str(choice):
            return choice
    allowed = ", ".join(map(str, choices))
    raise ValueError(f"must be one of {allowed}, not {_json(value)}")


def _from_json(value: Any, kind: type) -> Any:
    """Return the JSON value in a string, or ``value`` itself if it is not a string.

    Raises:
        ValueError: the string is not JSON. The text asks for a ``kind``.
    """
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            raise _wrong(value, kind) from None
    return value


def _sequence(value: Any, kind: Any, arguments: tuple[Any, ...]) -> Any:
    """Return a list, or a set or tuple if ``kind`` is one, of items of the type ``arguments[0]``.

    ``arguments`` are those of the type hint; empty for any items.
    """
    items = _from_json(value, list)
    if not isinstance(items, list | tuple | set):
        raise _wrong(value, list)
    hint = arguments[0] if arguments else Any
    values = [coerce(item, hint) for item in items]
    return kind(values) if kind in (set, tuple) else values


def _mapping(value: Any, arguments: tuple[Any, ...]) -> Any:
    """Return a dictionary; ``arguments`` are the types of its keys and values, or empty."""
    items = _from_json(value, dict)
    if not isinstance(items, Mapping):
        raise _wrong(value, dict)
    key, item = arguments if len(arguments) == 2 else (Any, Any)
    return {coerce(k, key): coerce(v, item) for k, v in items.items()}


def _enum(value: Any, kind: type[enum.Enum]) -> enum.Enum:
    """Return the member of an enumeration that has this value or name; case does not matter."""
    for member in kind:
        if value in (member, member.value) or str(value).upper() == member.name.upper():
            return member
    allowed = ", ".join(member.name for member in kind)
    raise ValueError(f"must be one of {allowed}, not {_json(value)}")


def _record(value: Any, kind: type) -> Any:
    """Return an object of the dataclass ``kind``, from itself, a mapping of its fields or JSON.

    Raises:
        ValueError: a field is unknown, or the class refuses the values.
    """
    fields = _from_json(value, dict)
    if isinstance(fields, kind):
        return fields
    if not isinstance(fields, Mapping):
        raise _wrong(value, dict)
    known = [f.name for f in dataclasses.fields(kind) if f.init and not f.name.startswith("_")]
    for name in map(str, fields):
        if name not in known:
            raise ValueError(f"has no field '{shown(name)}'{closest(name, known)}")
    try:
        return kind(**fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"is refused by vLLM: {error}") from None
