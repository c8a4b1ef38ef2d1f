"""Turn rounds into medians, ranges and ratios, and these into tables."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING

from harness import results

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from harness.machine import Machine
    from harness.metrics import Measurement

LEGEND = (
    "medians over rounds, with the least and the most; names and definitions are those of "
    "`vllm bench serve`: ITL is the gap between two pieces of an answer. "
    "In open loop TTFT starts when the request is due. "
    "Ratios are of output tokens/s, each within one round"
)
# The targets that the others are compared with.
_RATIOS_TO = ("engine", "openai")


@dataclass(frozen=True)
class Cell:
    """One load, which is the same for all targets in one table.

    Attributes:
        stream: whether the answers come in pieces.
        in_flight: number of clients. In an open loop, this is only the upper bound.
        workload: one of ``workload.KINDS``.
        rate: requests per second of an open loop; 0 is a closed loop.
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
        load = f"{self.in_flight} in flight"
        if self.rate:
            load = f"open loop, {self.rate:.4g} requests/s"
        workload = "" if self.workload == "fixed" else f"{self.workload}, "
        return f"{mode}, {load}, {workload}{self.prompt_tokens} + {self.answer_tokens} tokens"


@dataclass(frozen=True)
class Round:
    """One target's measurement in one round of a cell."""

    cell: Cell
    target: str
    number: int
    measured: Measurement
    # Over this measurement, by role. The load generator is "load".
    cpu_s: dict[str, float]
    # Resident memory of the target's processes right after this measurement, by role.
    memory_bytes: dict[str, float]


@dataclass(frozen=True)
class Column:
    """One column of the table.

    Attributes:
        head: the column's heading.
        name: the field of ``Measurement``.
        factor: changes the unit: 1e3 shows seconds as ms.
        digits: number of digits after the point.
        streaming: only for streams. A whole answer has one piece, and so no gaps.
        open_loop: only for open loops.
    """

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


def median_and_range(values: list[float], digits: int) -> str:
    """Return the median; for several rounds, also minimum and maximum."""
    middle = f"{median(values):,.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):,.{digits}f}-{max(values):,.{digits}f})"


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    return "\n".join([lines[0], "|---" * len(heads) + "|", *lines[1:]])


def ratios(rounds: list[Round], target: str, to: str) -> list[float]:
    """Return the output tokens/s of ``target`` divided by those of ``to``, for each common round.

    Speeds of one round are compared, because other work on the machine slows all its targets.
    """
    # Target -> number of the round -> output tokens/s.
    speeds: dict[str, dict[int, float]] = defaultdict(dict)
    for entry in rounds:
        speeds[entry.target][entry.number] = entry.measured.output_throughput
    bases = speeds[to]
    return [speed / bases[number] for number, speed in speeds[target].items() if number in bases]


def per_thousand(rounds: list[Round]) -> dict[str, float]:
    """Return the median CPU seconds per 1000 output tokens, by role."""
    roles = sorted({role for entry in rounds for role in entry.cpu_s})
    return {
        role: median(e.cpu_s.get(role, 0.0) / e.measured.output_tokens * 1000 for e in rounds)
        for role in roles
    }


def table(rounds: list[Round]) -> str:
    """Return the table of one cell in Markdown; all rounds must be of that cell."""
    cell = rounds[0].cell
    columns = [
        column
        for column in _COLUMNS
        if (cell.stream or not column.streaming) and (cell.rate or not column.open_loop)
    ]
    by_target: dict[str, list[Round]] = defaultdict(list)
    for entry in rounds:
        by_target[entry.target].append(entry)
    bases = [target for target in by_target if target in _RATIOS_TO]
    # 1) The heads: the ratios come after the first figure, output tokens/s
    heads = [column.head for column in columns]
    heads[1:1] = [f"/ {base}" for base in bases]
    # 2) A row for each target
    rows = []
    for target, own_rounds in by_target.items():
        figures = []
        for column in columns:
            values = [getattr(entry.measured, column.name) * column.factor for entry in own_rounds]
            figures.append(median_and_range(values, column.digits))
        figures[1:1] = [median_and_range(ratios(rounds, target, base), 2) for base in bases]
        memory = [sum(entry.memory_bytes.values()) / 1e9 for entry in own_rounds]
        figures.append(median_and_range(memory, 2))
        # A role that would be shown as 0.000 is left out.
        seconds = per_thousand(own_rounds).items()
        used = [f"{role} {value:.3f}" for role, value in seconds if value >= 0.0005]
        rows.append([target, *figures, ", ".join(used)])
    return markdown(["target", *heads, "memory GB", "CPU s per 1000 tokens"], rows)


def write(out: Path, title: str, machine: Machine, notes: list[str], rounds: list[Round]) -> None:
    """Write the report to ``out``.md and ``out``.json.

    Args:
        out: the report's path without suffix, from ``results.reserve``.
        title: the heading.
        machine: the machine.
        notes: lines for the head.
        rounds: the measurements so far.
    """
    # The cells keep the order in which they were measured.
    cells: dict[Cell, list[Round]] = defaultdict(list)
    for entry in rounds:
        cells[entry.cell].append(entry)
    parts = [
        f"# {title}",
        "\n".join([*machine.lines(), *(f"- {note}" for note in [*notes, LEGEND])]),
    ]
    for cell, entries in cells.items():
        parts += [f"## {cell.title}", table(entries)]
    results.write_text(out, parts)
    content = {
        "machine": asdict(machine),
        "notes": notes,
        "rounds": [asdict(entry) for entry in rounds],
    }
    results.write_json(out, content)
