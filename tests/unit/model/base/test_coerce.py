"""Values as clients and old files write them become the types that vLLM declares, or are refused by name."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import pytest

from triton_vllm.base.coerce import closest, coerce


class Colour(enum.Enum):
    RED = "r"


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        ("100", int | None, 100),
        (3.0, int, 3),
        ("0.5", float, 0.5),
        ("false", bool, False),
        ("1", int | str, "1"),
        (0, bool, False),
        (None, int | None, None),
        ("[1, 2]", list[int], [1, 2]),
        ({"5": "1.5"}, dict[int, float], {5: 1.5}),
        ('{"a": 1}', dict[str, Any] | None, {"a": 1}),
        (["a"], set[str], {"a"}),
        (["1"], Sequence[int], [1]),
        (["1"], Iterable[int] | None, [1]),
        ("r", Colour, Colour.RED),
        ("red", Colour, Colour.RED),
        ("1", Literal[0, 1], 1),
        ({"x": 1}, Point, Point(1)),
    ],
)
def test_what_fits_is_converted(value, hint, expected):
    """Strings stand for numbers, booleans and JSON, as genai-perf and old files send them."""
    made = coerce(value, hint)
    assert made == expected
    assert type(made) is type(expected)


@pytest.mark.parametrize(
    ("value", "hint", "says"),
    [
        (True, int, "an integer, not true"),
        (True, float, "a finite number, not true"),
        (5, type(None), "null, not 5"),
        (1.5, int, "an integer"),
        (float("nan"), int, "an integer"),
        ("10e999", float, "a finite number"),
        (2, bool, "true or false"),
        (3, str, "a string"),
        ("x", list[int], "a list"),
        ("x", dict[str, int], "an object"),
        ("c", Literal["a", "b"], "one of a, b"),
        ({"z": 1}, Point, "has no field 'z'"),
        ({}, Point, "is refused by vLLM"),
    ],
)
def test_what_does_not_fit_is_refused(value, hint, says):
    """Nothing is guessed: false for "false", and no boolean, NaN or fraction becomes an integer."""
    with pytest.raises(ValueError, match=r"^(must be|has no|is refused)") as caught:
        coerce(value, hint)
    assert says in str(caught.value)


def test_closest_names_a_near_miss_only():
    """A typo gets a hint, an unrelated word none, and neither does a long one, for the search takes longer than linearly."""
    assert closest("temprature", ["temperature", "top_p"]) == ", did you mean 'temperature'?"
    assert closest("zzz", ["temperature"]) == ""
    assert closest("x" * 71, ["x" * 70]) == ""
