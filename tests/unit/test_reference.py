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


def test_an_old_table_is_reported_and_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rest of the page stays, and the second run has nothing to do."""
    page = tmp_path / "page.md"
    begin, end = "before\n<!-- limits: tools/reference.py writes this -->\n", "<!-- end of limits -->\nafter\n"
    page.write_text(f"{begin}| `MAX_N` | old | `1` |\n{end}")
    monkeypatch.setattr(reference, "ROOT", tmp_path)
    monkeypatch.setattr(reference, "PAGES", (page,))
    assert reference.main(["--check"]) == 1
    assert "old" in page.read_text()
    assert reference.main([]) == 0
    text = page.read_text()
    assert (text.startswith(begin), text.endswith(end)) == (True, True)
    assert "| `MAX_N` | Completions of a request | `128` |" in text
    assert "old" not in text
    assert reference.main(["--check"]) == 0
    assert capsys.readouterr().out == "page.md: differs\npage.md: written\n"


def test_every_parameter_has_a_meaning() -> None:
    """A new field of Settings or Limits without a text is a KeyError here."""
    tables = [reference.TABLES[name]() for name in ("behaviour", "permissions", "limits")]
    rows = [line for table in tables for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) == len({row.split("`")[1] for row in rows})
    assert all(len(row.split(" | ")[1]) > 10 for row in rows)
