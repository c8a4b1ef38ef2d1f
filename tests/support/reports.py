"""The committed results of the benchmarks, as tests compare them with the pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FIRST_MINUTE = "first_minute-20261127-2339-707bb022"
"""Builds and starts of five rounds, before and after."""
LATER_FIRST_MINUTES = ("first_minute-20261128-0514-00542c60", "first_minute-20261128-0529-00542c60")
"""One round and four rounds of a later commit."""


def measured(report: str) -> Any:
    """Return a report's content, an object or a list."""
    return json.loads((ROOT / "benchmarks/results" / f"{report}.json").read_text("utf-8"))
