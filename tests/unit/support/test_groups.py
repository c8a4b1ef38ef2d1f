"""The order in which tests run, and their groups."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from support.groups import group, sort


def item(nodeid: str, *fixtures: str, ends: bool = False) -> Any:
    """Return what a test item shows of itself."""
    mark = SimpleNamespace(args=()) if ends else None
    return SimpleNamespace(
        nodeid=nodeid,
        fixturenames=fixtures,
        get_closest_marker=lambda name: mark if name == "ends_server" else None,
    )


def test_what_ends_a_server_comes_after_all_that_ask_it() -> None:
    """Also after tests of another folder, which would otherwise come later."""
    ends = item("tests/e2e/test_a.py::test_end", "first_start", ends=True)
    asks = item("tests/hostile/test_b.py::test_ask", "server", "first_start")
    unit = item("tests/unit/test_c.py::test_unit")
    items = [unit, ends, asks]
    sort(items, ("tests/e2e", "tests/hostile", ""))
    assert items == [asks, unit, ends]
    assert [group(one) for one in items] == ["first_start", "tests/unit/test_c.py", "first_start"]
