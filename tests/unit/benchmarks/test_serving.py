"""benchmarks/serving.py: tables with ranges, open loops as shares of capacity, reports that replace none."""

from __future__ import annotations

import json
import os
import re
import signal
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

BASE = ["--environment", "env"]


@pytest.fixture
def serving() -> Any:
    import serving

    return serving


def options(*arguments: str) -> Any:
    """Return what the command line gives."""
    from harness.options import parse

    return parse([*BASE, *arguments], None)


def round_of(cell: Any, target: str, number: int, **figures: float) -> Any:
    """Return a round with these figures; the others are one. Each round has a gigabyte more than the last."""
    from harness.report import Round

    memory = {"server": (number + 1) * 1e9, "stub": 0.5e9}
    return Round(cell, target, number, measurement(**figures), {"server": 0.5, "load": 9.0}, memory)


def measurement(**figures: float) -> Any:
    """Return a measurement with these figures; the others are one."""
    from harness.metrics import Measurement

    given: dict[str, Any] = dict.fromkeys(Measurement.__dataclass_fields__, 1.0)
    return Measurement(**{**given, **figures})


def cell(in_flight: int = 8, **values: Any) -> Any:
    """Return a streaming cell."""
    from harness.report import Cell

    return Cell(**{"stream": True, "in_flight": in_flight, "answer_tokens": 64, "prompt_tokens": 32} | values)


def test_the_table_has_medians_with_their_ranges() -> None:
    """Each figure of three rounds with the least and the most; ratios are of the same round."""
    from harness.report import table

    speeds = {"openai": [100.0, 200.0, 400.0], "triton": [110.0, 180.0, 480.0]}
    rounds = [
        round_of(cell(), target, n, output_throughput=speed, itl_p99=0.001 * (n + 1), pieces_per_answer=60 + n)
        for target, each in speeds.items()
        for n, speed in enumerate(each)
    ]
    head, _, openai, triton = ([part.strip() for part in line.strip("|").split("|")] for line in table(rounds).splitlines())
    shown = dict(zip(head, triton, strict=True))
    assert shown["output tokens/s"] == "180 (110-480)"
    assert shown["/ openai"] == "1.10 (0.90-1.20)"
    assert shown["ITL p99 ms"] == "2.0 (1.0-3.0)"
    assert shown["pieces an answer"] == "61.0 (60.0-62.0)"
    # of all roles together
    assert shown["memory GB"] == "2.50 (1.50-3.50)"
    assert dict(zip(head, openai, strict=True))["/ openai"] == "1.00 (1.00-1.00)"
    assert "/ engine" not in head
    assert "unfinished" not in head


def test_each_measurement_is_written_at_once(serving: Any, tmp_path: Path) -> None:
    """A machine that is taken away costs only the measurement that runs."""
    from harness import machine

    written: list[list[Any]] = []

    class Fake:
        name = "triton"

        def cpu(self) -> dict[str, float]:
            return {}

        resident = cpu

        def measure(self, load: Any) -> Any:
            if load.seconds:  # not the warm-up
                files = tmp_path.glob("*.json")
                written.append([entry for file in files for entry in json.loads(file.read_text())["rounds"]])
            return measurement()

    other = Fake()
    other.name = "openai"
    given = options("--rounds", "2", "--settle", "0", "--out", str(tmp_path / "serving"))
    conditions = machine.Machine(**dict.fromkeys(machine.Machine.__dataclass_fields__, "x"))
    serving.Run(given, "command", conditions, []).add(cell(), [other, Fake()])
    assert [len(rounds) for rounds in written] == [0, 1, 2, 3]
    assert [(entry["target"], entry["number"]) for entry in written[-1]] == [("openai", 0), ("triton", 0), ("triton", 1)]


def test_memory_counts_a_shared_page_once() -> None:
    """Two processes that share their pages have less together than twice one's resident memory."""
    import psutil

    from harness import processes

    block = bytearray(b"x") * (64 << 20)
    child = os.fork()
    if not child:
        signal.pause()
        os._exit(0)
    try:
        both = [psutil.Process(), psutil.Process(child)]
        resident = sum(process.memory_info().rss for process in both)
        assert 0 < sum(map(processes.resident, both)) < resident - len(block) // 2
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with pytest.raises(psutil.NoSuchProcess):
        processes.resident(both[1])


def test_a_report_replaces_none(tmp_path: Path) -> None:
    """Runs of one minute and commit have names of their own; each has its row, with its commit and command."""
    from harness import results

    out, about = tmp_path / "results" / "serving", r"abc1234 with changes | `serving.py --note 'a\|b'` |"
    stems = [results.reserve(out, "abc1234 with changes", "serving.py --note 'a|b'") for _ in range(3)]
    assert len({stem.name for stem in stems}) == 3
    assert all("abc1234-with-changes" in stem.name and stem.with_name(f"{stem.name}.md").exists() for stem in stems)
    rows = (out.parent / "runs.md").read_text().splitlines()
    assert len(rows) == 2 + 3
    assert all(f"[{stem.name}]({stem.name}.md) | {about}" in row for stem, row in zip(stems, rows[2:], strict=True))


def test_the_pages_name_every_figure() -> None:
    """docs/benchmarks.md has those that docs/client.md lacks; `--help` has the loads."""
    from harness.report import _COLUMNS
    from support.repositories import CHECKOUT

    pages = "".join((CHECKOUT / "docs" / name).read_text("utf-8") for name in ("benchmarks.md", "client.md"))
    figures = {re.sub(r" (p50|p99|ms)", "", column.head) for column in _COLUMNS if column.name != "unfinished"}
    assert [figure for figure in figures if figure not in pages] == []
    assert "| memory |" in pages
