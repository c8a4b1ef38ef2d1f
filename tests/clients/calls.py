"""Calls of a program that asks a server as users do: ``python PROGRAM.py URL... ANSWERS.json``.

Such a program runs in the lane's own environment. The file gets what each call said: the answer, or the error's class and status.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

CALLS: dict[str, Callable[..., Any]] = {}


def call(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add a call to those that are made."""
    CALLS[function.__name__] = function
    return function


def plain(value: Any) -> Any:
    """Return an answer of any package as JSON."""
    return value.model_dump(mode="json", warnings=False) if hasattr(value, "model_dump") else value


def events(stream: Iterable[Any]) -> dict[str, Any]:
    """Return a stream's events without what is a matter of time, such as the pieces that a text comes in."""
    values = [plain(event) for event in stream]
    kinds = [value.get("type") or value.get("object") or "" for value in values]
    kinds = [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before]
    shape = sorted({path for value in values for path in paths(value)})
    return {"kinds": kinds, "shape": shape, "text": "".join(map(text_in, values))}


def paths(value: Any, place: str = "") -> Iterable[str]:
    """Return where values of which types are."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from paths(item, f"{place}.{name}")
    elif isinstance(value, list):
        for item in value:
            yield from paths(item, f"{place}[]")
    else:
        yield f"{place}: {type(value).__name__}"


def text_in(event: dict[str, Any]) -> str:
    """Return the piece of text, or of a tool's arguments, that an event has."""
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or choice
        called = [one["function"] for one in delta.get("tool_calls") or ()]
        words = [one.get(name) or "" for one in called for name in ("name", "arguments")]
        return (delta.get("content") or delta.get("text") or "") + "".join(words)
    delta = event.get("delta")
    if isinstance(delta, dict):
        return delta.get("text") or delta.get("partial_json") or ""
    return delta or ""


def outcome(function: Callable[..., Any], urls: list[str]) -> dict[str, Any]:
    """Return the answer of a call, or what its error says."""
    try:
        return {"status": 200, "answer": plain(function(*urls))}
    except Exception as error:  # each package has classes of its own
        status = getattr(error, "status_code", None) or getattr(error, "status", lambda: None)()
        return {"status": status, "error": type(error).__name__, "message": str(error)}


def main() -> None:
    """Make all calls."""
    *urls, answers = sys.argv[1:]
    said = {name: outcome(function, urls) for name, function in CALLS.items()}
    Path(answers).write_text(json.dumps(said), encoding="utf-8")
