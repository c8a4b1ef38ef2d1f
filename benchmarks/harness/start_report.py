"""Turn starts into tables by case and phase."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from harness import results
from harness.report import shown

if TYPE_CHECKING:
    from pathlib import Path

    from harness.machine import Machine
    from harness.phases import Phase


@dataclass(frozen=True)
class Start:
    """One start of one case, in seconds since the launch."""

    case: str
    number: int
    first: bool
    ready_s: float
    first_token_s: float
    phases: list[Phase]


def table(starts: list[Start]) -> str:
    """Return times to ready and to the first token by case, for first and later starts, with ratios to the first case."""
    base = starts[0].case
    lines = [
        f"| case | start | ready s | first token s | ready / {base} |",
        "|---|---|---|---|---|",
    ]
    for case in dict.fromkeys(entry.case for entry in starts):
        for name, first in (("first", True), ("later", False)):
            mine, basis = (
                [e for e in starts if e.case == each and e.first == first] for each in (case, base)
            )
            if mine:
                compared = (
                    median(e.ready_s for e in mine) / median(e.ready_s for e in basis)
                    if basis
                    else None
                )
                ready, token = (
                    shown([e.ready_s for e in mine], 1),
                    shown([e.first_token_s for e in mine], 1),
                )
                lines.append(
                    f"| {case} | {name} | {ready} | {token} | {'-' if compared is None else f'{compared:.2f}'} |"
                )
    return "\n".join(lines)


def phase_table(starts: list[Start]) -> str:
    """Return median seconds by phase and case."""
    cases = list(dict.fromkeys(entry.case for entry in starts))
    names = dict.fromkeys(phase.name for entry in starts for phase in entry.phases)
    lines = [f"| phase | {' | '.join(cases)} |", "|---" * (len(cases) + 1) + "|"]
    for name in names:
        columns = []
        for case in cases:
            found = [
                p.seconds
                for entry in starts
                if entry.case == case
                for p in entry.phases
                if p.name == name
            ]
            columns.append(f"{median(found):.1f}" if found else "-")
        lines.append(f"| {name} | {' | '.join(columns)} |")
    return "\n".join(lines)


@dataclass
class Report:
    """The starts so far and their report, which is first written when there is a start."""

    out: Path
    described: Machine
    command: str
    notes: list[str]
    starts: list[Start] = field(default_factory=list)
    stem: Path | None = None

    def write(self) -> None:
        """Write the report as Markdown and JSON."""
        self.stem = out = self.stem or results.take(self.out, self.described.commit, self.command)
        head = "\n".join([*self.described.lines(), *(f"- {note}" for note in self.notes)])
        heading = "## By phase, median seconds"
        parts = [
            "# Cold start",
            head,
            table(self.starts),
            heading,
            phase_table(self.starts),
        ]
        out.with_name(f"{out.name}.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
        content = {
            "machine": asdict(self.described),
            "notes": self.notes,
            "starts": [asdict(e) for e in self.starts],
        }
        out.with_name(f"{out.name}.json").write_text(
            json.dumps(content, indent=1) + "\n", encoding="utf-8"
        )
