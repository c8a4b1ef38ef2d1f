"""The size of a constraint is that of what would be compiled from it."""

from __future__ import annotations

import pytest

from triton_vllm.base.limits import USUAL
from triton_vllm.constraints.checks import MANY_REPETITIONS, check, expansion


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("a{3}", (3, 0)),
        ("a{3}{4}", (12, 0)),
        ("ab{2,5}c", (7, 0)),
        ("a{0}", (1, 0)),
        ("(ab){3}", (9, 1)),
        ("((a{10}){10}){10}", (1110, 2)),
        ("[a-z{}]{4}", (4, 0)),
        (r"[^\]x]{2}", (2, 0)),
        ("[]x]{2}", (2, 0)),
        ("((a))(b)", (5, 2)),
        (r"\d{4}-\d{2}", (7, 0)),
        (r"\p{Lu}{3}", (7, 0)),
        ("a{x}", (4, 0)),
        (")a)", (3, 0)),
    ],
)
def test_expansion(pattern, expected):
    """Repetitions are written out, within each other too; what stands in a class or behind a backslash is one character."""
    assert expansion(pattern) == expected


def test_a_huge_expansion_is_not_counted_to_its_end():
    """Numbers of any length, any number of times."""
    assert expansion("a" + "{999999999999999}" * 1000)[0] == MANY_REPETITIONS


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "[0-9]{3}-[xyz]"},
        {"regex": r"(\+\d{1,3})?[ -]?(\(\d{3}\))?[0-9]{4,15}"},
        {"grammar": 'root ::= "a" "b"{3} ("c" | "(")'},
        {"json": {"type": "object", "properties": {"pattern": {"type": "string", "maxLength": 4000}, "enum": {"enum": [1, 2]}}}},
        {"json_object": True, "json": None},
        {"regex": 5},
        {"choice": 5},
        {"json": [1]},
    ],
)
def test_ordinary_constraints_pass(fields):
    """Those that people write; what is of the wrong type is refused where types are."""
    check(USUAL, fields)
