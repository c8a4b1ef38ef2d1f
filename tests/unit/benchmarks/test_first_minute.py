"""benchmarks/first_minute.py: what a build printed, when it only waited, and the table of both."""

from __future__ import annotations

import itertools
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from vllm_env.base.report import Console

if TYPE_CHECKING:
    from pathlib import Path


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


@pytest.mark.parametrize(
    ("busy", "received", "waited"),
    [(0.1, 1e6, 1.0), (0.5, 1e6, 0.0), (0.1, 1e4, 0.0)],
    ids=["waits", "computes meanwhile", "waits for something else"],
)
def test_a_build_waits_while_bytes_arrive_and_nothing_computes(
    monkeypatch: pytest.MonkeyPatch, busy: float, received: float, waited: float
) -> None:
    """Of two periods of half a second."""
    import first_minute

    watch = first_minute.Watch()
    samples = ((n * 0.5, n * 0.5 * busy, n * 0.5 * received) for n in itertools.count())
    monkeypatch.setattr(first_minute, "_sample", lambda: next(samples))
    ends = iter([False, False, True])
    monkeypatch.setattr(watch, "_end", type("End", (), {"wait": lambda _self, _seconds: next(ends)})())
    watch.run()
    assert watch.waited_s == pytest.approx(waited)
    assert watch.received == received


def test_a_build_has_a_home_of_its_own_and_its_processor_time_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no settings of this user; a build that fails shows what it printed."""
    import first_minute

    program = tmp_path / "checkout" / "gen_vllm_env.sh"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "$HOME,$XDG_CACHE_HOME,$VLLM_ENV_CACHE"\necho "lock          2.1 s  147 wheels"\n')
    program.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", "/mine")
    monkeypatch.setenv("VLLM_ENV_CACHE", "/mine")
    one = first_minute.build(program.parent, tmp_path / "home", "abc", "empty")
    assert (tmp_path / "empty.log").read_text().splitlines()[0] == f"{tmp_path / 'home'},,"
    assert (one.commit, one.step, one.stages) == ("abc", "empty", {"lock": 2.1})
    assert 0 < one.processor_s < 60
    program.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(subprocess.CalledProcessError):
        first_minute.build(program.parent, tmp_path / "home", "abc", "empty")


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


def test_the_environment_is_the_unpacked_one_or_else_the_prefix(tmp_path: Path) -> None:
    """With --layout archive, only Triton unpacks, for each start."""
    import first_minute

    cache = tmp_path / ".cache/vllm_env"
    for folder in ("prefixes/k/env", "unpacked/u"):
        (cache / folder / "bin").mkdir(parents=True)
        (cache / folder / "bin/python").symlink_to("python3")
        (cache / folder / "bin/python3").touch()
        assert first_minute.environment_of(tmp_path) == cache / folder
