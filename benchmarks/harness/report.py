"""Turn rounds into medians, ranges and ratios, and these into tables."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    """One load, which is the same for all targets in one table.

    With a ``rate`` (requests/s) it is an open loop, and ``in_flight`` is its upper bound.
    """

    stream: bool
    in_flight: int
    answer_tokens: int
    prompt_tokens: int
    workload: str = "fixed"
    rate: float = 0.0

    @property
    def title(self) -> str:
        """Return the heading of the cell's table."""
        mode = "streaming" if self.stream else "whole answers"
        load = (
            f"open loop, {self.rate:.4g} requests/s" if self.rate else f"{self.in_flight} in flight"
        )
        workload = "" if self.workload == "fixed" else f"{self.workload}, "
        return f"{mode}, {load}, {workload}{self.prompt_tokens} + {self.answer_tokens} tokens"


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
    """One column of the table: the field ``name`` of Measurement times ``factor``, with ``digits`` after the point."""

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
    """Return the median; for several rounds, also minimum and maximum."""
    text = f"{median(values):,.{digits}f}"
    return (
        text
        if len(values) == 1
        else f"{text} ({min(values):,.{digits}f}-{max(values):,.{digits}f})"
    )


def ratios(rounds: list[Round], target: str, to: str) -> list[float]:
    """Return the output tokens/s of ``target`` divided by those of ``to``, for each round that has both."""
    speed = {(entry.target, entry.number): entry.measured.output_throughput for entry in rounds}
    pairs = [
        (speed.get((target, n)), speed.get((to, n)))
        for n in sorted({entry.number for entry in rounds})
    ]
    return [a / b for a, b in pairs if a and b]


def per_thousand(rounds: list[Round]) -> dict[str, float]:
    """Return the median CPU seconds per 1000 output tokens, by role."""
    roles = sorted({role for entry in rounds for role in entry.cpu_s})
    return {
        role: median(e.cpu_s.get(role, 0.0) / e.measured.output_tokens * 1000 for e in rounds)
        for role in roles
    }


def table(rounds: list[Round]) -> str:
    """Return the table of one cell as Markdown."""
    cell = rounds[0].cell
    columns = [
        c for c in _COLUMNS if (cell.stream or not c.streaming) and (cell.rate or not c.open_loop)
    ]
    targets = list(dict.fromkeys(entry.target for entry in rounds))
    bases = [target for target in targets if target in _RATIOS_TO]
    heads = [
        "target",
        columns[0].head,
        *(f"/ {base}" for base in bases),
        *(c.head for c in columns[1:]),
    ]
    lines = [
        f"| {' | '.join([*heads, 'CPU s per 1000 tokens'])} |",
        "|---" * (len(heads) + 1) + "|",
    ]
    for target in targets:
        mine = [entry for entry in rounds if entry.target == target]
        figures = [
            shown([getattr(e.measured, c.name) * c.factor for e in mine], c.digits) for c in columns
        ]
        figures[1:1] = [shown(ratios(rounds, target, base), 2) for base in bases]
        used = ", ".join(
            f"{role} {used:.3f}" for role, used in per_thousand(mine).items() if used >= 0.0005
        )
        lines.append(f"| {target} | {' | '.join([*figures, used])} |")
    return "\n".join(lines)


def by_cell(rounds: list[Round]) -> dict[Cell, list[Round]]:
    """Group rounds by cell; the cells keep the order in which they were measured."""
    cells: dict[Cell, list[Round]] = {}
    for entry in rounds:
        cells.setdefault(entry.cell, []).append(entry)
    return cells


def write(out: Path, title: str, machine: Machine, notes: list[str], rounds: list[Round]) -> None:
    """Write the report to ``out``.md and ``out``.json."""
    parts = [
        f"# {title}",
        "\n".join([*machine.lines(), *(f"- {note}" for note in [*notes, LEGEND])]),
    ]
    for cell, entries in by_cell(rounds).items():
        parts.append(f"## {cell.title}\n\n{table(entries)}")
    out.with_name(f"{out.name}.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    content = {
        "machine": asdict(machine),
        "notes": notes,
        "rounds": [asdict(entry) for entry in rounds],
    }
    out.with_name(f"{out.name}.json").write_text(
        json.dumps(content, indent=1) + "\n", encoding="utf-8"
    )
