"""benchmarks/serving.py: tables with ranges, open loops as shares of capacity, reports that replace none."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from contextlib import nullcontext
from dataclasses import replace
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


@pytest.mark.parametrize(
    ("changed", "there", "missing"),
    [
        ({"stream": False}, ["E2EL p99 ms"], ["ITL p99 ms", "TTFT p50 ms"]),
        ({"rate": 3.5}, ["unfinished", "sent late p99 ms"], []),
    ],
)
def test_a_table_has_the_columns_of_its_load(changed: dict[str, Any], there: list[str], missing: list[str]) -> None:
    """A whole answer has no gaps, an open loop says what it left unfinished; one round has no range."""
    from harness.report import table

    text = table([round_of(replace(cell(), **changed), "triton", 0)])
    assert all(f"| {head} |" in text for head in there)
    assert not any(f"| {head} |" in text for head in missing)
    assert "(" not in text


def test_shares_are_of_the_slowest_targets_capacity(serving: Any) -> None:
    """With the most in flight, whichever is slower: above its capacity one target's queue would only grow."""
    rounds = [
        round_of(cell(in_flight), target, n, request_throughput=speed + n)
        for in_flight, speeds in ((8, (10.0, 20.0)), (128, (40.0, 30.0)))
        for target, speed in zip(("openai", "triton"), speeds, strict=True)
        for n in range(3)
    ]
    rounds.append(round_of(replace(cell(128), stream=False), "openai", 0, request_throughput=1.0))
    notes: list[str] = []
    found = serving.open_cells(options("--in-flight", "8", "128", "--shares", "0.5", "0.8", "--rates", "20"), rounds, notes)
    assert [each.rate for each in found] == pytest.approx([15.5, 20, 24.8])
    assert all(each.stream and each.in_flight == 512 for each in found)
    assert "31 requests/s, the slowest's (triton)" in notes[0]


def test_a_round_has_the_memory_right_after_its_load(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up is one load, and each round is another."""
    target = GrowingTarget()
    monkeypatch.setattr(serving, "first_in_line", nullcontext)
    rounds = serving.run_cell([target], cell(), options("--rounds", "2", "--settle", "0"))
    assert [entry.memory_bytes for entry in rounds] == [{"server": 2e9}, {"server": 3e9}]


class GrowingTarget:
    """A target whose memory grows by a gigabyte with each load."""

    name = "triton"

    def __init__(self) -> None:
        self.loads = 0

    def measure(self, load: Any) -> Any:
        self.loads += 1
        return measurement()

    def cpu(self) -> dict[str, float]:
        return {"server": 1.0}

    def resident(self) -> dict[str, float]:
        return {"server": self.loads * 1e9}


def test_memory_is_that_of_a_servers_whole_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the processes that it has started; the OpenAI port has those of its Triton."""
    import psutil

    from harness import processes
    from harness.servers import Setting
    from harness.targets import PortTarget, TritonTarget

    # memory changes all the time, a process's number never
    monkeypatch.setattr(processes, "resident", lambda process: process.pid)
    server = TritonTarget(Setting.of(options(), {}, tmp_path))
    # it writes a line when its child is there
    server.launch(["sh", "-c", "sleep 60 & echo; wait"], stdout=subprocess.PIPE)
    started = server.running()
    assert started.stdout
    try:
        assert started.stdout.readline()
        (child,) = psutil.Process(started.pid).children()
        for target in (server, PortTarget(server)):
            assert sum(target.resident().values()) == started.pid + child.pid
    finally:
        processes.end_session(started.pid, patience_s=0)
        started.wait()
        started.stdout.close()


def test_what_cannot_be_measured_is_refused_before_anything_starts() -> None:
    """With what to do about it."""
    for arguments in (
        ["--shares", "0.5", "--modes", "whole"],
        ["--shares", "0.5", "--in-flight"],
        ["--rates", "5", "--workload", "multi-turn"],
        ["--targets", "nobody"],
        ["--targets", "port", "openai"],
    ):
        with pytest.raises(SystemExit):
            options(*arguments)
    assert options().seconds == 60


def test_the_plan_says_how_long_it_takes(serving: Any) -> None:
    """Two loads in two modes and two rates, three targets, two rounds; each with its window, its rest and its last answers."""
    given = options(
        "--in-flight", "1", "8", "--shares", "0.5", "--rates", "9", "--rounds", "2", "--seconds", "60", "--settle", "1"
    )
    assert serving.plan(given, 3) == "36 measurements of 60 s: about 37 minutes"


def test_engines_share_a_gpus_memory(serving: Any, tmp_path: Path) -> None:
    """Equal parts; what is named stays."""
    gpu = ["--device", "gpu", "--prompt-tokens", "32", "--work", str(tmp_path), "--triton-root", str(tmp_path)]
    for more, expected in (
        ([], 0.31),
        (["--targets", "openai", "triton"], 0.47),
        (["--targets", "openai", "triton", "port"], 0.47),
        (["--engine-arguments", '{"gpu_memory_utilization": 0.2}'], 0.2),
    ):
        _, setting = serving.prepare(options(*gpu, *more), [])
        assert setting.arguments["gpu_memory_utilization"] == pytest.approx(expected)
        assert setting.arguments["distributed_executor_backend"].endswith(".UniProcExecutor")


def test_requests_longer_than_the_model_are_refused(serving: Any, tmp_path: Path) -> None:
    """Four turns of 512 tokens do not fit into 2048 with their answers."""
    long = options("--workload", "multi-turn", "--prompt-tokens", "512", "--work", str(tmp_path))
    with pytest.raises(SystemExit, match="longer than max_model_len 2048"):
        serving.prepare(long, [])


def test_a_report_replaces_none(tmp_path: Path) -> None:
    """Runs of one minute and commit have names of their own; each has its row, with its commit and command."""
    from harness import results

    out, about = tmp_path / "results" / "serving", r"abc1234 with changes | `serving.py --note 'a\|b'` |"
    stems = [results.take(out, "abc1234 with changes", "serving.py --note 'a|b'") for _ in range(3)]
    assert len({stem.name for stem in stems}) == 3
    assert all("abc1234-with-changes" in stem.name and stem.with_name(f"{stem.name}.md").exists() for stem in stems)
    rows = (out.parent / "runs.md").read_text().splitlines()
    assert len(rows) == 2 + 3
    assert all(f"[{stem.name}]({stem.name}.md) | {about}" in row for stem, row in zip(stems, rows[2:], strict=True))


def test_a_report_is_written(tmp_path: Path) -> None:
    """Closed and open loops of one run in one report, with a table each."""
    from harness import report
    from harness.machine import Machine

    rounds = [round_of(each, target, 0) for each in (cell(), cell(512, rate=12.5)) for target in ("openai", "triton")]
    report.write(tmp_path / "run", "Serving", Machine(*["-"] * 10), ["command: x"], rounds)
    text = (tmp_path / "run.md").read_text()
    assert "## streaming, open loop, 12.5 requests/s, 32 + 64 tokens" in text
    assert "## streaming, 8 in flight, 32 + 64 tokens" in text
    assert text.count("| triton |") == 2
    written = json.loads((tmp_path / "run.json").read_text())["rounds"]
    assert [entry["memory_bytes"] for entry in written] == [{"server": 1e9, "stub": 0.5e9}] * 4


def test_the_page_names_every_load_and_figure() -> None:
    """docs/benchmarks.md: its options are the parser's, its figures the table's."""
    from harness.report import _COLUMNS
    from support.repositories import CHECKOUT

    page = (CHECKOUT / "docs" / "benchmarks.md").read_text("utf-8").split("## Starts")[0]
    page = re.sub(r"(?s)## What works on a GPU\n.*?(?=## )", "", page)  # another program's
    named = [shlex.split(text) for text in re.findall(r"`(--[^`]+)`", page)]
    for arguments in named:
        if arguments[0] != "--help":
            chosen = {"--executor": ["--executor", "default"]}.get(arguments[0], arguments)
            full = {"--rounds": ["3"], "--turns": ["4"], "--prompt-tokens": ["32"], "--tokens": ["64"]}
            options(*chosen, *(full.get(arguments[0], []) if len(arguments) == 1 else []))
    assert len(named) > 9
    figures = {re.sub(r" (p50|p99|ms)", "", column.head) for column in _COLUMNS if column.name != "unfinished"}
    assert all(figure in page for figure in figures)
    assert "| memory |" in page


@pytest.mark.parametrize("allowed", [True, False])
def test_the_load_generator_runs_first_while_it_measures(allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And only then, so that servers that are started later do not inherit it; where that is not allowed, it says so."""
    from harness import processes

    now = (os.SCHED_BATCH, os.sched_param(0))

    def set_now(_who: int, policy: int, parameters: os.sched_param) -> None:
        nonlocal now
        if not allowed:
            raise PermissionError
        now = (policy, parameters)

    monkeypatch.setattr(os, "sched_getscheduler", lambda _: now[0])
    monkeypatch.setattr(os, "sched_getparam", lambda _: now[1])
    monkeypatch.setattr(os, "sched_setscheduler", set_now)
    with processes.first_in_line() as ahead:
        assert (ahead, now[0]) == (allowed, os.SCHED_RR if allowed else os.SCHED_BATCH)
    assert now == (os.SCHED_BATCH, os.sched_param(0))


@pytest.mark.parametrize(("device", "name"), [("cpu", "OMP_NUM_THREADS"), ("gpu", "VLLM_USE_FLASHINFER_SAMPLER")])
def test_the_setting_of_a_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, name: str) -> None:
    """Whole paths, and the variables of the device."""
    from harness.servers import Setting

    monkeypatch.chdir(tmp_path)
    setting = Setting.of(options("--device", device), {"model": "x"}, tmp_path, instances=2)
    assert setting.environment == tmp_path / "env"
    assert name in setting.variables
    assert setting.instances == 2
