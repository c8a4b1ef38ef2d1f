"""Reports are added, never replaced: each run has a name of its own, with its time and commit, and a row in `runs.md`."""

from __future__ import annotations

import itertools
import re
from datetime import datetime, timezone
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_HEAD = "| when | report | commit | command |\n|---|---|---|---|\n"


def _claim(out: Path, commit: str) -> Path:
    """Return a stem beside `out` that no report has: the time and commit are added to its name, which an empty `.md` takes."""
    out.parent.mkdir(parents=True, exist_ok=True)
    name = f"{out.name}-{datetime.now(timezone.utc):%Y%m%d-%H%M}-{re.sub(r'[^A-Za-z0-9_]+', '-', commit)}"
    for number in itertools.count(1):
        stem = out.with_name(name if number == 1 else f"{name}-{number}")
        try:
            stem.with_name(f"{stem.name}.md").open("x", encoding="utf-8").close()
        except FileExistsError:
            continue
        return stem
    raise AssertionError


def _record(stem: Path, commit: str, command: str) -> None:
    """Add the row of a run to `runs.md` beside its report."""
    runs = stem.with_name("runs.md")
    head = "" if runs.exists() else _HEAD
    escaped = command.replace("|", r"\|")
    row = f"| {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC | [{stem.name}]({stem.name}.md) | {commit} | `{escaped}` |\n"
    with runs.open("a", encoding="utf-8") as file:
        file.write(head + row)


def take(out: Path, commit: str, command: str) -> Path:
    """Return the stem of a run that has measured something already, and add its row."""
    stem = _claim(out, commit)
    _record(stem, commit, command)
    return stem
