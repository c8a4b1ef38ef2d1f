"""tools/reference.py: the tables that are made from code are in the pages as the code has them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

import reference

if TYPE_CHECKING:
    from pathlib import Path


def test_the_pages_have_what_the_code_has(capsys: pytest.CaptureFixture[str]) -> None:
    """If this fails, run `python3 tools/reference.py`."""
    assert reference.main(["--check"]) == 0, capsys.readouterr().out
    markers = [re.findall(r"<!-- end of ([\w ]+) -->", page.read_text("utf-8")) for page in reference.PAGES]
    assert {name for page in markers for name in page} >= set(reference.TABLES)


def test_a_page_that_differs_is_named_and_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --check; without it the page is written."""
    page = tmp_path / "page.md"
    old = "<!-- limits: tools/reference.py writes this -->\nold\n<!-- end of limits -->\n"
    page.write_text(old, "utf-8")
    monkeypatch.setattr(reference, "PAGES", (page,))
    monkeypatch.setattr(reference, "ROOT", tmp_path)
    assert reference.main(["--check"]) == 1
    assert (page.read_text("utf-8"), capsys.readouterr().out) == (old, "page.md: differs\n")
    assert reference.main([]) == 0
    assert reference.main(["--check"]) == 0


def test_every_parameter_has_a_meaning() -> None:
    """A new field of Settings or Limits without a text is a KeyError here."""
    tables = [reference.TABLES[name]() for name in ("behaviour", "permissions", "limits")]
    rows = [line for table in tables for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) == len({row.split("`")[1] for row in rows})
    assert all(len(row.split(" | ")[1]) > 10 for row in rows)
