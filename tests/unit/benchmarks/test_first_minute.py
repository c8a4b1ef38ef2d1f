"""benchmarks/first_minute.py: what a build printed, when it only waited, and the table of both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from vllm_env.base.report import Console

if TYPE_CHECKING:
    pass


def test_stages_are_read_as_the_build_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    """Also one within another; other lines with seconds are none."""
    import first_minute

    console = Console()
    with console.stage("verify"), console.stage("smoke run"):
        console.step("ready after 16 s, 4 answers")
    console.note("tools      … into /tmp/tools")
    console.note("waits 3.5 s for another build")
    assert set(first_minute.stages_of(capsys.readouterr().err)) == {"verify", "smoke run"}
    assert first_minute.stages_of("tools         6.3 s\n") == {"tools": 6.3}


def test_the_tables_have_a_row_for_each_step_and_commit() -> None:
    """Median and range; the best build is counted without the time in which it only waited."""
    import first_minute

    def of(step: str, seconds: float, **more: Any) -> Any:
        return first_minute.Measured("abc", step, seconds, **more)

    measured = [
        of("vllm", 20.0),
        of("empty", 90.0, waited_s=1.0),
        of("empty", 100.0, waited_s=15.0),
        of("empty", 95.0),
        of("first", 15.0),
    ]
    builds, starts = first_minute.tables(measured)
    assert "| empty | abc | 95.0 (90.0-100.0) | 85.0 | 1.0 (0.0-15.0) |" in builds
    assert starts.splitlines()[2:] == ["| first | abc | 15.0 |", "| vllm | abc | 20.0 |"]
