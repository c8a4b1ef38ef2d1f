"""tools/reference.py: the tables that are made from code are in the pages as the code has them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

import reference

if TYPE_CHECKING:
    pass


def test_the_pages_have_what_the_code_has(capsys: pytest.CaptureFixture[str]) -> None:
    """If this fails, run `python3 tools/reference.py`."""
    assert reference.main(["--check"]) == 0, capsys.readouterr().out
    markers = [re.findall(r"<!-- end of ([\w ]+) -->", page.read_text("utf-8")) for page in reference.PAGES]
    assert {name for page in markers for name in page} >= set(reference.TABLES)


def test_every_parameter_has_a_meaning() -> None:
    """A new field of Settings or Limits without a text is a KeyError here."""
    tables = [reference.TABLES[name]() for name in ("behaviour", "permissions", "limits")]
    rows = [line for table in tables for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) == len({row.split("`")[1] for row in rows})
    assert all(len(row.split(" | ")[1]) > 10 for row in rows)
