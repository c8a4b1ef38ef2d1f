"""Record the servers and engines that a run starts: each costs many seconds of CPU.

`note_start` appends a line to ``starts.txt`` in the run's folder; pytest's summary counts them by kind.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import TYPE_CHECKING, Any

from support.once import run_folder

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

TRITON = "tritonserver"
OPENAI = "vLLM server"
IN_PROCESS = "engine in process"
_NAME = "starts.txt"
_NO_ENGINE = "no engine"
_LONGEST = 200  # characters of the engine arguments; one write of a short line is not mixed with another worker's


def note_start(kind: str, engine_args: Mapping[str, Any] | None = None, *, engine: bool = True) -> None:
    """Note that the current test starts a program.

    Args:
        kind: what is counted; a plain word, of which the summary makes no plural.
        engine_args: what the engine is started with.
        engine: False for a server that starts no real vLLM engine.
    """
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    arguments = json.dumps(dict(engine_args or {}), default=str)[:_LONGEST]
    line = "\t".join((kind, "engine" if engine else _NO_ENGINE, test, arguments))
    with (run_folder() / _NAME).open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def summary(folder: Path) -> str:
    """Return one line with the starts by kind, or nothing if there were none."""
    file = folder / _NAME
    if not file.exists():
        return ""
    starts = [line.split("\t") for line in file.read_text(encoding="utf-8").splitlines()]
    kinds = Counter(start[0] for start in starts)
    bare = Counter(start[0] for start in starts if start[1] == _NO_ENGINE)
    return "server starts: " + ", ".join(_count(kind, number, bare[kind]) for kind, number in kinds.items())


def _count(kind: str, number: int, bare: int) -> str:
    return f"{number} {kind} ({bare} without an engine)" if bare else f"{number} {kind}"
