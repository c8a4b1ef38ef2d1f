"""The table of what a client sees when a part of a server dies."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

FILE = "VLLM_ENV_TEST_CHAOS_TABLE"
"""The variable with the path of the table."""
HEAD = """\
# What a client sees when a part of a server dies

- `tests/chaos/test_serving.py`, {day}; {cores} cores, load {load:.0f} from this and other work
- the pinned vLLM on {device}, `max_num_seqs: 2`, `ENGINE_TIMEOUT_SECONDS` 20. Most of the seconds are starts of vLLM
- at its end, no process, shared memory or temporary folder was left

"""
TABLE = "| what happens | what the client sees | served again after |\n|---|---|---|\n"


@dataclass
class ChaosTable:
    """Collects the rows; the last one is complete when its test has passed."""

    rows: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, case: str, seen: str, seconds: float | None) -> None:
        """Add a row; without seconds, nobody but the client was harmed."""
        again = "others are served on" if seconds is None else f"{seconds:.1f} s"
        self.rows.append((case, " ".join(seen.split()), again))

    def write(self) -> None:
        """Write the table where the variable says, or print it."""
        day = datetime.now(timezone.utc).date()
        head = HEAD.format(day=day, cores=os.cpu_count(), load=os.getloadavg()[0], device=device())
        text = head + TABLE + "".join(f"| {' | '.join(row)} |\n" for row in self.rows)
        file = os.environ.get(FILE)
        if file:
            Path(file).write_text(text, "utf-8")
        else:
            print(f"\n{text}")


def device() -> str:
    """Return the name of the first GPU that the servers see, or "a CPU"."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    if shutil.which(query[0]) is None:
        return "a CPU"
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
