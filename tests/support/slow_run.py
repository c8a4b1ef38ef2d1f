"""Notes how the last run with ``--slow`` has ended, so that it can be seen when all was last tested."""

from __future__ import annotations

import datetime
import json
import subprocess
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

PLACE = ".tools/slow-run.json"
COUNTED = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")


@dataclass(frozen=True)
class Sources:
    """What is tested: the commit, and whether the working tree differs from it."""

    commit: str
    changed: bool


def read_sources(checkout: Path) -> Sources:
    """Return what a run tests; read it as the run begins, for others may commit during two hours."""
    return Sources(_git(checkout, "rev-parse", "HEAD"), bool(_git(checkout, "status", "--porcelain")))


def note(checkout: Path, sources: Sources, arguments: Sequence[str], stats: Mapping[str, Sequence[Any]], status: int) -> None:
    """Write a run's result into the checkout.

    Args:
        checkout: where the tests were run.
        sources: what was tested.
        arguments: pytest's; they say whether it was all tests.
        stats: the reports by outcome.
        status: pytest's exit status.
    """
    found = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **asdict(sources),
        "arguments": list(arguments),
        "exit_status": status,
        **{outcome: len(stats.get(outcome, ())) for outcome in COUNTED},
    }
    file = checkout / PLACE
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def _git(checkout: Path, *arguments: str) -> str:
    """Return what git prints, or nothing where there is no git or no repository."""
    try:
        done = subprocess.run(["git", "-C", checkout, *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
