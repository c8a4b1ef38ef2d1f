"""Write reports so that none is replaced: each run adds files, and a row in ``runs.md``."""

from __future__ import annotations

import json
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

OUT_HELP = "name of the report, to which time and commit are added (default: %(default)s)"
_HEAD = "| when | report | commit | command |\n|---|---|---|---|\n"


def add_options(parser: argparse.ArgumentParser, out: Path) -> None:
    """Add the options of a report, with the folder and the name of the reports by default."""
    add = parser.add_argument
    add("--out", type=Path, default=out, metavar="PATH", help=OUT_HELP)
    add("--commit", default="", help="commit for the report of a copy without git history")


def _claim(out: Path, commit: str) -> Path:
    """Reserve a name for a report, and return its path without suffix.

    The name is that of ``out`` with the time and the commit, and a number if it is taken.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    # The commit may have words for its state, "abc1234 with changes".
    word = re.sub(r"[^A-Za-z0-9_]+", "-", commit)
    name = f"{out.name}-{datetime.now(timezone.utc):%Y%m%d-%H%M}-{word}"
    stem = out.with_name(name)
    number = 1
    while True:
        try:
            # An empty report reserves the name. Mode x fails if another run has taken it.
            stem.with_name(f"{stem.name}.md").open("x", encoding="utf-8").close()
        except FileExistsError:
            number += 1
            stem = out.with_name(f"{name}-{number}")
        else:
            return stem


def _record(stem: Path, commit: str, command: str) -> None:
    """Add a row for a run to ``runs.md`` next to its report."""
    runs = stem.with_name("runs.md")
    head = "" if runs.exists() else _HEAD
    when = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC"
    # A bar would end the cell of the table.
    escaped = command.replace("|", r"\|")
    row = f"| {when} | [{stem.name}]({stem.name}.md) | {commit} | `{escaped}` |\n"
    with runs.open("a", encoding="utf-8") as file:
        file.write(head + row)


def reserve(out: Path, commit: str, command: str) -> Path:
    """Reserve the files of a run's report, and add its row to ``runs.md``.

    Call this when there is a measurement, so that a run that failed leaves no row.

    Args:
        out: folder and name of the reports of this benchmark.
        commit: the commit of the checkout.
        command: the command line.

    Returns:
        the report's path without suffix, for ``write_text`` and ``write_json``.
    """
    stem = _claim(out, commit)
    _record(stem, commit, command)
    return stem


def write_text(stem: Path, parts: Iterable[str]) -> None:
    """Write a report's Markdown, with an empty line between its parts."""
    stem.with_name(f"{stem.name}.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def write_json(stem: Path, content: object) -> None:
    """Write a report's figures."""
    text = json.dumps(content, indent=1) + "\n"
    stem.with_name(f"{stem.name}.json").write_text(text, encoding="utf-8")
