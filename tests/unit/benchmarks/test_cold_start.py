"""benchmarks/cold_start.py: the order of the starts, their kinds, the cases, and a report after each start."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def cold_start() -> Any:
    import cold_start

    return cold_start


def test_each_round_has_an_empty_home(cold_start: Any, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases take turns. Each start is in the report before the next one begins."""
    from harness.start_report import Start

    seen: list[tuple[str, int, int]] = []

    def start(case: str, number: int, setting: Any, report: Any, *, place: int) -> Any:
        written = json.loads(report.stem.with_suffix(".json").read_text())["starts"] if report.stem else []
        assert len(written) == len(seen)
        seen.append((case, number, place))
        assert setting.variables["HOME"].endswith(f"home-{case}")
        return Start(case, number, place, 10.0 + place, 11.0, [])

    monkeypatch.setattr(cold_start, "start", start)
    options = [f"ours={repository}", "--environment", str(tmp_path), "--own-server", "--keep-page-cache"]
    options += ["--rounds", "2", "--first-starts", "1", "--starts", "2", "--triton-root", str(tmp_path)]
    assert cold_start.main([*options, "--out", str(tmp_path / "out" / "starts"), "--work", str(tmp_path / "work")]) == 0
    assert [place for case, _, place in seen if case == "ours"] == [0, 1, 2, 0, 1, 2]
    assert [case for case, _, _ in seen[:3]] == ["ours", cold_start.OWN, "ours"]


def test_the_table_has_first_second_and_later_starts() -> None:
    """The second one may still have to compile."""
    from harness.phases import Phase
    from harness.start_report import Start, phase_table, table

    starts = [Start("ours", place, place, 30.0 - place, 31.0, [Phase("weights", place + 1.0)]) for place in range(4)]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table(starts).splitlines()[2:]]
    assert [row[1:3] for row in rows] == [["first", "30.0"], ["second", "29.0"], ["later", "27.5 (27.0-28.0)"]]
    assert "| phase | ours, first | ours, second | ours, later |" in phase_table(starts)
    assert "| weights | 1.0 | 2.0 | 3.5 |" in phase_table(starts)


def test_own_server_needs_an_environment(cold_start: Any, repository: Path) -> None:
    """A built repository alone has no program to start."""
    with pytest.raises(SystemExit):
        cold_start.parse([f"ours={repository}", "--own-server"])
    with pytest.raises(SystemExit):
        cold_start.parse([])
