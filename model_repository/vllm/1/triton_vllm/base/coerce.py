"""Convert JSON values to the types that vLLM declares.

Old files and clients such as genai-perf write numbers and booleans as strings ("100", "true"). vLLM
would take "false" as true. This module refuses a value that does not fit. vLLM checks few types
itself, and fails later and less clearly.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import json
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Union

LONG_NAME = 60
"""Characters of a client's value that an error repeats; a longer name is not a misspelt one of ours."""
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a finite number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


def coerce(value: Any, hint: Any) -> Any:  # noqa: PLR0911 - a table of cases reads best as one
    """Return ``value`` as the type ``hint``.

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
    if kind in (list, set, tuple) or kind in (typing.Sequence, typing.Iterable):
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
    if len(name) > LONG_NAME:  # the search takes more than linear time
        return ""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f", did you mean '{found[0]}'?" if found else ""


def shown(value: str) -> str:
    """Return a text, shortened if it is long, for an error."""
    return value if len(value) <= LONG_NAME else value[: LONG_NAME - 3] + "..."


def to_bool(value: Any) -> bool:
    """Return a boolean from true, false, 1, 0 or a string that spells one."""
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower() if isinstance(value, str | int) else ""
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise _wrong(value, bool)


def to_int(value: Any) -> int:
    """Return a 64-bit integer from an integer, an integral float or a string of one; refuse a boolean."""
    if isinstance(value, str):
        try:
            # "100.0" and "1e3" are integers as well.
            value = int(value) if not set(value) & set(".eE") else float(value)
        except ValueError:
            raise _wrong(value, int) from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(value, int)
    if isinstance(value, float) and not value.is_integer():  # also true for NaN and infinity
        raise _wrong(value, int)
    if (
        not -(2**63) <= value < 2**63
    ):  # vLLM's processes talk by msgpack, which has no larger integers
        raise ValueError("must be an integer of 64 bits")
    return int(value)


def to_float(value: Any) -> float:
    """Return a finite float from a number or a string of one; refuse a boolean."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _wrong(value, float)
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise _wrong(value, float) from None
    if not math.isfinite(number):
        raise _wrong(value, float)
    return number


def to_str(value: Any) -> str:
    """Return a string; refuse anything else."""
    if not isinstance(value, str):
        raise _wrong(value, str)
    return value


def _none(value: Any) -> None:
    if value is not None:
        raise _wrong(value, str)


_SIMPLE: dict[Any, Callable[[Any], Any]] = {
    bool: to_bool,
    int: to_int,
    float: to_float,
    str: to_str,
    type(None): _none,
}


def _wrong(value: Any, kind: type) -> ValueError:
    return ValueError(f"must be {_NAMES[kind]}, not {_json(value)}")


def _json(value: Any) -> str:
    # Shortened before it is written as JSON, because a client's value may be huge.
    return shown(
        json.dumps(value[:LONG_NAME] if isinstance(value, str | list) else value, default=str)
    )


def _union(value: Any, members: tuple[Any, ...]) -> Any:
    if value is None and type(None) in members:
        return None
    candidates = [m for m in members if m is not type(None)]
    # The type that the value already has goes first, so that e.g. a string stays one where a number
    # would do, too.
    exact = [m for m in candidates if (typing.get_origin(m) or m) is type(value)]
    problems = []
    for member in [*exact, *(m for m in candidates if m not in exact)]:
        try:
            return coerce(value, member)
        except ValueError as error:
            problems.append(error)
    # the error of the type that fits best
    raise problems[0]


def _literal(value: Any, choices: tuple[Any, ...]) -> Any:
    for choice in choices:
        # The type must match as well: in Python, True equals 1.
        if value == choice and type(value) is type(choice):
            return choice
    for choice in choices:  # also take "1" for 1
        if str(value) == str(choice):
            return choice
    allowed = ", ".join(str(c) for c in choices)
    raise ValueError(f"must be one of {allowed}, not {_json(value)}")


def _from_json(value: Any, kind: type) -> Any:
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            raise _wrong(value, kind) from None
    return value


def _sequence(value: Any, kind: Any, arguments: tuple[Any, ...]) -> Any:
    items = _from_json(value, list)
    if not isinstance(items, list | tuple | set):
        raise _wrong(value, list)
    hint = arguments[0] if arguments else Any
    made = [coerce(item, hint) for item in items]
    return kind(made) if kind in (set, tuple) else made


def _mapping(value: Any, arguments: tuple[Any, ...]) -> Any:
    items = _from_json(value, dict)
    if not isinstance(items, Mapping):
        raise _wrong(value, dict)
    key, item = arguments if len(arguments) == 2 else (Any, Any)
    return {coerce(k, key): coerce(v, item) for k, v in items.items()}


def _enum(value: Any, kind: type[enum.Enum]) -> enum.Enum:
    for member in kind:
        if value in (member, member.value) or str(value).upper() == member.name.upper():
            return member
    raise ValueError(f"must be one of {', '.join(m.name for m in kind)}, not {_json(value)}")


def _record(value: Any, kind: type) -> Any:
    fields = _from_json(value, dict)
    if isinstance(fields, kind):
        return fields
    if not isinstance(fields, Mapping):
        raise _wrong(value, dict)
    known = [f.name for f in dataclasses.fields(kind) if f.init and not f.name.startswith("_")]
    for name in fields:
        if name not in known:
            raise ValueError(f"has no field '{shown(str(name))}'{closest(str(name), known)}")
    try:
        return kind(**fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"is refused by vLLM: {error}") from None
