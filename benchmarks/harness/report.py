"""Rounds into medians, spreads and ratios; those into a table and a figure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING

from harness import svg

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from harness.load import Measurement
    from harness.machine import Machine

_HEAD = (
    "| target | tokens/s (min-max) | / engine | / openai | TTFT p50 / p99 ms | ITL p50 ms | gap p99 ms "
    "| e2e p50 / p99 ms | pieces an answer | CPU s per 1000 tokens |"
)


@dataclass(frozen=True)
class Cell:
    """One load: what is the same for all targets in one row group of the table."""

    stream: bool
    in_flight: int
    answer_tokens: int
    prompt_tokens: int

    @property
    def title(self) -> str:
        """The heading of the cell's table."""
        mode = "streaming" if self.stream else "whole answers"
        return f"{mode}, {self.in_flight} in flight, {self.prompt_tokens} + {self.answer_tokens} tokens"


@dataclass(frozen=True)
class Round:
    """One target's measurement in one round of a cell."""

    cell: Cell
    target: str
    number: int
    measured: Measurement
    cpu_s: dict[str, float]  # by role, over this measurement; the load generator is "load"


def per_thousand(rounds: list[Round]) -> dict[str, float]:
    """Return median CPU seconds per 1000 tokens by role."""
    roles = {role for entry in rounds for role in entry.cpu_s}
    return {role: median(entry.cpu_s.get(role, 0.0) / entry.measured.tokens * 1000 for entry in rounds) for role in sorted(roles)}


def ratio(rounds: list[Round], target: str, to: str) -> float | None:
    """Return the median over rounds of tokens/s of `target` over those of `to`, each within one round."""
    speed = {(entry.target, entry.number): entry.measured.tokens_per_s for entry in rounds}
    numbers = {entry.number for entry in rounds}
    pairs = [(speed.get((target, n)), speed.get((to, n))) for n in numbers]
    ratios = [a / b for a, b in pairs if a and b]
    return median(ratios) if ratios else None


def table(rounds: list[Round]) -> str:
    """Return the markdown of one cell."""
    lines = [_HEAD, "|---" * 10 + "|"]
    for target in dict.fromkeys(entry.target for entry in rounds):
        mine = [entry for entry in rounds if entry.target == target]
        lines.append(f"| {target} | " + " | ".join(_columns(mine, rounds, target)) + " |")
    return "\n".join(lines)


def _columns(mine: list[Round], rounds: list[Round], target: str) -> list[str]:
    def mid(name: str) -> float:
        values: list[float] = [getattr(entry.measured, name) for entry in mine]
        return median(values)

    speeds = [entry.measured.tokens_per_s for entry in mine]
    ratios = [ratio(rounds, target, to) for to in ("engine", "openai")]
    stream = mine[0].cell.stream
    return [
        f"{median(speeds):,.0f} ({min(speeds):,.0f}-{max(speeds):,.0f})",
        *("-" if value is None else f"{value:.2f}" for value in ratios),
        f"{mid('ttft_p50') * 1e3:.1f} / {mid('ttft_p99') * 1e3:.1f}" if stream else "-",
        f"{mid('itl_p50') * 1e3:.2f}" if stream else "-",
        f"{mid('gap_p99') * 1e3:.1f}" if stream else "-",
        f"{mid('e2e_p50') * 1e3:.0f} / {mid('e2e_p99') * 1e3:.0f}",
        f"{mid('pieces_per_answer'):.1f}",
        ", ".join(f"{role} {used:.3f}" for role, used in per_thousand(mine).items() if used >= 0.0005),
    ]


def by_cell(rounds: list[Round]) -> dict[Cell, list[Round]]:
    """Group rounds, cells in the order in which they were measured."""
    cells: dict[Cell, list[Round]] = {}
    for entry in rounds:
        cells.setdefault(entry.cell, []).append(entry)
    return cells


def figure(title: str, rounds: list[Round]) -> str:
    """Return bar charts by requests in flight, one row for each mode, answer and prompt length."""
    panels = []
    kinds = dict.fromkeys(_kind(cell) for cell in by_cell(rounds))
    for kind in kinds:
        stream, answer, prompt = kind
        mine = [entry for entry in rounds if _kind(entry.cell) == kind]
        load = f"{'streaming' if stream else 'whole'}, {prompt} + {answer} tokens"
        panels.append(_panel(load, "tokens/s", mine, lambda entry: entry.measured.tokens_per_s))
        panels.append(_panel(f"cost, {load}", "CPU s per 1000 tokens", mine, _cost))
        if stream:
            panels.append(_panel(f"TTFT p50, {load}", "s", mine, lambda entry: entry.measured.ttft_p50))
    return svg.draw(title, panels)


def _kind(cell: Cell) -> tuple[bool, int, int]:
    return cell.stream, cell.answer_tokens, cell.prompt_tokens


def _cost(entry: Round) -> float:
    """Return the processor seconds of all processes of the target, without the load generator's."""
    return sum(used for role, used in entry.cpu_s.items() if role != "load") / entry.measured.tokens * 1000


def _panel(title: str, unit: str, rounds: list[Round], value: Callable[[Round], float]) -> svg.Panel:
    groups = sorted({entry.cell.in_flight for entry in rounds})
    values: dict[str, list[float | None]] = {}
    for target in dict.fromkeys(entry.target for entry in rounds):
        found = [[value(e) for e in rounds if e.target == target and e.cell.in_flight == group] for group in groups]
        values[target] = [median(each) if each else None for each in found]
    return svg.Panel(title, unit, [f"{group} in flight" for group in groups], values)


def write(out: Path, title: str, machine: Machine, notes: list[str], rounds: list[Round]) -> None:
    """Write `out`.md, .svg and .json."""
    out.parent.mkdir(parents=True, exist_ok=True)
    parts = [f"# {title}", "\n".join([*machine.lines(), *(f"- {note}" for note in notes)])]
    for cell, entries in by_cell(rounds).items():
        parts.append(f"## {cell.title}\n\n{table(entries)}")
    parts.append(f"![throughput and time to first token]({out.name}.svg)")
    out.with_name(f"{out.name}.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    out.with_name(f"{out.name}.svg").write_text(figure(title, rounds), encoding="utf-8")
    content = {"machine": asdict(machine), "notes": notes, "rounds": [asdict(entry) for entry in rounds]}
    out.with_name(f"{out.name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
