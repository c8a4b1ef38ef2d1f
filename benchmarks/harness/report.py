"""Rounds into medians, ranges and ratios; those into tables and a figure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING

from harness import svg

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from harness.machine import Machine
    from harness.metrics import Measurement

LEGEND = (
    "medians over rounds, with the least and the most; names and definitions are those of `vllm bench serve`: ITL is the gap "
    "between two pieces of an answer. In open loop TTFT starts when the request is due. Ratios are of output tokens/s, each "
    "within one round"
)
_RATIOS_TO = ("engine", "openai")


@dataclass(frozen=True)
class Cell:
    """One load: what is the same for all targets in one row group of the table.

    `rate` (requests/s) makes it an open loop, which has `in_flight` as its bound; `stream_interval` is that of vLLM's server.
    """

    stream: bool
    in_flight: int
    answer_tokens: int
    prompt_tokens: int
    workload: str = "fixed"
    rate: float = 0.0
    stream_interval: int = 1

    @property
    def title(self) -> str:
        """The heading of the cell's table."""
        mode = "streaming" if self.stream else "whole answers"
        load = f"open loop, {self.rate:.4g} requests/s" if self.rate else f"{self.in_flight} in flight"
        interval = f", vLLM's server with --stream-interval {self.stream_interval}" if self.stream_interval > 1 else ""
        workload = "" if self.workload == "fixed" else f"{self.workload}, "
        return f"{mode}, {load}, {workload}{self.prompt_tokens} + {self.answer_tokens} tokens{interval}"


@dataclass(frozen=True)
class Round:
    """One target's measurement in one round of a cell."""

    cell: Cell
    target: str
    number: int
    measured: Measurement
    cpu_s: dict[str, float]  # by role, over this measurement; the load generator is "load"


@dataclass(frozen=True)
class Column:
    """One figure of the table: `name` of Measurement, shown `factor` times with `digits` after the point."""

    head: str
    name: str
    factor: float = 1
    digits: int = 0
    streaming: bool = False
    open_loop: bool = False


_COLUMNS = (
    Column("output tokens/s", "output_throughput"),
    Column("requests/s", "request_throughput", digits=1),
    Column("TTFT p50 ms", "ttft_p50", 1e3, 1, streaming=True),
    Column("TTFT p99 ms", "ttft_p99", 1e3, 1, streaming=True),
    Column("TPOT p50 ms", "tpot_p50", 1e3, 2, streaming=True),
    Column("TPOT p99 ms", "tpot_p99", 1e3, 2, streaming=True),
    Column("ITL p50 ms", "itl_p50", 1e3, 1, streaming=True),
    Column("ITL p99 ms", "itl_p99", 1e3, 1, streaming=True),
    Column("E2EL p50 ms", "e2el_p50", 1e3),
    Column("E2EL p99 ms", "e2el_p99", 1e3),
    Column("pieces an answer", "pieces_per_answer", digits=1, streaming=True),
    Column("unfinished", "unfinished", open_loop=True),
    Column("sent late p99 ms", "sent_late_p99", 1e3, 1, open_loop=True),
)


def shown(values: list[float], digits: int) -> str:
    """Return the median, with the least and the most where they are of several rounds."""
    text = f"{median(values):,.{digits}f}"
    return text if len(values) == 1 else f"{text} ({min(values):,.{digits}f}-{max(values):,.{digits}f})"


def ratios(rounds: list[Round], target: str, to: str) -> list[float]:
    """Return output tokens/s of `target` over those of `to` within each round that has both."""
    speed = {(entry.target, entry.number): entry.measured.output_throughput for entry in rounds}
    pairs = [(speed.get((target, n)), speed.get((to, n))) for n in sorted({entry.number for entry in rounds})]
    return [a / b for a, b in pairs if a and b]


def per_thousand(rounds: list[Round]) -> dict[str, float]:
    """Return median CPU seconds per 1000 output tokens by role."""
    roles = sorted({role for entry in rounds for role in entry.cpu_s})
    return {role: median(e.cpu_s.get(role, 0.0) / e.measured.output_tokens * 1000 for e in rounds) for role in roles}


def table(rounds: list[Round]) -> str:
    """Return the markdown of one cell."""
    cell = rounds[0].cell
    columns = [c for c in _COLUMNS if (cell.stream or not c.streaming) and (cell.rate or not c.open_loop)]
    targets = list(dict.fromkeys(entry.target for entry in rounds))
    bases = [target for target in targets if target.startswith(_RATIOS_TO)]
    heads = ["target", columns[0].head, *(f"/ {base}" for base in bases), *(c.head for c in columns[1:])]
    lines = [f"| {' | '.join([*heads, 'CPU s per 1000 tokens'])} |", "|---" * (len(heads) + 1) + "|"]
    for target in targets:
        mine = [entry for entry in rounds if entry.target == target]
        figures = [shown([getattr(e.measured, c.name) * c.factor for e in mine], c.digits) for c in columns]
        figures[1:1] = [shown(ratios(rounds, target, base), 2) for base in bases]
        used = ", ".join(f"{role} {used:.3f}" for role, used in per_thousand(mine).items() if used >= 0.0005)
        lines.append(f"| {target} | {' | '.join([*figures, used])} |")
    return "\n".join(lines)


def by_cell(rounds: list[Round]) -> dict[Cell, list[Round]]:
    """Group rounds, cells in the order in which they were measured."""
    cells: dict[Cell, list[Round]] = {}
    for entry in rounds:
        cells.setdefault(entry.cell, []).append(entry)
    return cells


def figure(title: str, rounds: list[Round]) -> str:
    """Return bar charts by requests in flight, and by rate for the open loop."""
    panels = []
    closed = [entry for entry in rounds if not entry.cell.rate and entry.cell.stream_interval == 1]
    for kind in dict.fromkeys(_kind(entry.cell) for entry in closed):
        mine = [entry for entry in closed if _kind(entry.cell) == kind]
        panels.append(_panel(f"output throughput, {_load(kind)}", "tokens/s", mine, lambda e: e.measured.output_throughput))
        panels.append(_panel(f"cost, {_load(kind)}", "CPU s per 1000 tokens", mine, _cost))
        if mine[0].cell.stream:
            panels.append(_panel(f"TTFT p50, {_load(kind)}", "ms", mine, lambda e: e.measured.ttft_p50 * 1e3))
            panels.append(_panel(f"ITL p99, {_load(kind)}", "ms", mine, lambda e: e.measured.itl_p99 * 1e3))
    opened = [entry for entry in rounds if entry.cell.rate]
    for kind in dict.fromkeys(_kind(entry.cell) for entry in opened):
        mine = [entry for entry in opened if _kind(entry.cell) == kind]
        for name in ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99"):
            head = f"{name.replace('_', ' ').upper().replace('P', 'p', 1)}, open loop, {_load(kind)}"
            panels.append(_panel(head, "ms", mine, lambda e, name=name: getattr(e.measured, name) * 1e3))
    return svg.draw(title, panels)


def _kind(cell: Cell) -> tuple[bool, str, int, int]:
    return cell.stream, cell.workload, cell.prompt_tokens, cell.answer_tokens


def _load(kind: tuple[bool, str, int, int]) -> str:
    stream, workload, prompt, answer = kind
    return f"{'streaming' if stream else 'whole'}, {'' if workload == 'fixed' else workload + ' '}{prompt} + {answer}"


def _cost(entry: Round) -> float:
    """Return the processor seconds of all processes of the target, without the load generator's."""
    return sum(used for role, used in entry.cpu_s.items() if role != "load") / entry.measured.output_tokens * 1000


def _panel(title: str, unit: str, rounds: list[Round], value: Callable[[Round], float]) -> svg.Panel:
    groups = sorted({(entry.cell.rate, entry.cell.in_flight) for entry in rounds})
    values: dict[str, list[float | None]] = {}
    for target in dict.fromkeys(entry.target for entry in rounds):
        found = [[value(e) for e in rounds if e.target == target and (e.cell.rate, e.cell.in_flight) == g] for g in groups]
        values[target] = [median(each) if each else None for each in found]
    return svg.Panel(title, unit, [f"{rate:.3g}/s" if rate else f"{flying} in flight" for rate, flying in groups], values)


def write(out: Path, title: str, machine: Machine, notes: list[str], rounds: list[Round]) -> None:
    """Write `out`.md, .svg and .json."""
    parts = [f"# {title}", "\n".join([*machine.lines(), *(f"- {note}" for note in [*notes, LEGEND])])]
    for cell, entries in by_cell(rounds).items():
        parts.append(f"## {cell.title}\n\n{table(entries)}")
    parts.append(f"![throughput, time to first token and gaps]({out.name}.svg)")
    out.with_name(f"{out.name}.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    out.with_name(f"{out.name}.svg").write_text(figure(title, rounds), encoding="utf-8")
    content = {"machine": asdict(machine), "notes": notes, "rounds": [asdict(entry) for entry in rounds]}
    out.with_name(f"{out.name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
