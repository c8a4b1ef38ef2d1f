"""Name reports so that none is replaced: each run adds a file with its time and commit, and a row in ``runs.md``."""

from __future__ import annotations

import itertools
import re
from datetime import datetime, timezone
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_HEAD = "| when | report | commit | command |\n|---|---|---|---|\n"


def _claim(out: Path, commit: str) -> Path:
    """Return a new stem next to ``out``, made of its name, the time and the commit; an empty ``.md`` file reserves it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    name = f"{out.name}-{datetime.now(timezone.utc):%Y%m%d-%H%M}-{re.sub(r'[^A-Za-z0-9_]+', '-', commit)}"
    for number in itertools.count(1):
        stem = out.with_name(name if number == 1 else f"{name}-{number}")
        try:
            # Mode x fails if another run has taken the name meanwhile.
            stem.with_name(f"{stem.name}.md").open("x", encoding="utf-8").close()
        except FileExistsError:
            continue
        return stem
    raise AssertionError


def _record(stem: Path, commit: str, command: str) -> None:
    """Add a row for a run to ``runs.md`` next to its report."""
    runs = stem.with_name("runs.md")
    head = "" if runs.exists() else _HEAD
    escaped = command.replace("|", r"\|")
    row = f"| {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC | [{stem.name}]({stem.name}.md) | {commit} | `{escaped}` |\n"
    with runs.open("a", encoding="utf-8") as file:
        file.write(head + row)


def take(out: Path, commit: str, command: str) -> Path:
    """Return the stem for a run's report, and add its row; call this only when there is a measurement."""
    stem = _claim(out, commit)
    _record(stem, commit, command)
    return stem
