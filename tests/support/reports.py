"""The committed results of the benchmarks, as tests compare them with the pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def measured(report: str) -> Any:
    """Return a report's content, an object or a list."""
    return json.loads((ROOT / "benchmarks/results" / f"{report}.json").read_text("utf-8"))
