"""Turn starts into tables by case and phase."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from harness import results
from harness.report import markdown, median_and_range

if TYPE_CHECKING:
    from pathlib import Path

    from harness.machine import Machine
    from harness.phases import Phase


@dataclass(frozen=True)
class Start:
    """One start of one case.

    Attributes:
        case: the case's name.
        number: number of the start, from 0.
        place: number of the starts in this home before; with 0, it was empty.
        ready_s: seconds from the launch until the server was ready.
        first_token_s: seconds from the launch until the first answer.
        phases: where the time went.
    """

    case: str
    number: int
    place: int
    ready_s: float
    first_token_s: float
    phases: list[Phase]

    @property
    def kind(self) -> str:
        """Return ``first``, ``second`` or ``later``."""
        return _KINDS[min(self.place, len(_KINDS) - 1)]


# The second start finds what the first one has left, and may still have to compile.
_KINDS = ("first", "second", "later")


def table(starts: list[Start]) -> str:
    """Return a table of the seconds until ready and until the first token.

    It has a row for each kind of start of each case. The figures are medians with their ranges, and
    the ratio to the first case's time until ready.
    """
    groups: dict[tuple[str, str], list[Start]] = defaultdict(list)
    for entry in starts:
        groups[entry.case, entry.kind].append(entry)
    base = starts[0].case
    rows = []
    for case in dict.fromkeys(entry.case for entry in starts):
        for kind in _KINDS:
            ready = [entry.ready_s for entry in groups[case, kind]]
            token = [entry.first_token_s for entry in groups[case, kind]]
            # A kind may have no start yet.
            if ready:
                # The cases take turns, so the first case has a start of this kind, too.
                compared = median(ready) / median(e.ready_s for e in groups[base, kind])
                rows.append(
                    [
                        case,
                        kind,
                        median_and_range(ready, 1),
                        median_and_range(token, 1),
                        f"{compared:.2f}",
                    ]
                )
    return markdown(["case", "start", "ready s", "first token s", f"ready / {base}"], rows)


def phase_table(starts: list[Start]) -> str:
    """Return a table of median seconds.

    It has a row for each phase, and a column for each kind of start of each case.
    """
    cases = dict.fromkeys(entry.case for entry in starts)
    found = {(entry.case, entry.kind) for entry in starts}
    columns = [(case, kind) for case in cases for kind in _KINDS if (case, kind) in found]
    # Phase -> column -> the seconds in each start.
    seconds: dict[str, dict[tuple[str, str], list[float]]] = defaultdict(lambda: defaultdict(list))
    for entry in starts:
        for phase in entry.phases:
            seconds[phase.name][entry.case, entry.kind].append(phase.seconds)
    rows = []
    for name, by_column in seconds.items():
        medians = {column: f"{median(values):.1f}" for column, values in by_column.items()}
        rows.append([name, *(medians.get(column, "-") for column in columns)])
    return markdown(["phase", *(f"{case}, {kind}" for case, kind in columns)], rows)


@dataclass
class Report:
    """The starts so far and their report, which is first written when there is a start.

    Attributes:
        out: folder and name of the reports, as for ``results.reserve``.
        conditions: the machine, versions and commit.
        command: the command line.
        notes: lines for the head of the report.
        starts: the starts so far.
        stem: the report's path without suffix, if it was written.
    """

    out: Path
    conditions: Machine
    command: str
    notes: list[str]
    starts: list[Start] = field(default_factory=list)
    stem: Path | None = None

    def write(self) -> None:
        """Write the report as Markdown and JSON."""
        if self.stem is None:
            self.stem = results.reserve(self.out, self.conditions.commit, self.command)
        head = "\n".join([*self.conditions.lines(), *(f"- {note}" for note in self.notes)])
        heading = "## By phase, median seconds"
        parts = ["# Cold start", head, table(self.starts), heading, phase_table(self.starts)]
        results.write_text(self.stem, parts)
        content = {
            "machine": asdict(self.conditions),
            "notes": self.notes,
            "starts": [asdict(entry) for entry in self.starts],
        }
        results.write_json(self.stem, content)
