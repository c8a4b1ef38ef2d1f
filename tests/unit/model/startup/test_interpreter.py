"""Where a model's process and its children import from, and how a stub of several ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.patience import LIMIT

MODEL = Path(__file__).parents[4] / "model_repository" / "vllm" / "1"
PROGRAM = """
import atexit, sys
sys.path.insert(0, sys.argv[1])
from triton_vllm.startup import interpreter
class Slow:
    def __del__(self):
        print("taken apart")
slow = Slow()
if sys.argv[2] == "at once":
    interpreter.end_at_once()
atexit.register(print, "exit handler")
"""


def test_what_ends_at_once_has_run_its_exit_handlers():
    """Those that were registered later, as by what is imported later; modules are not taken apart."""

    def said(how):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, MODEL, how], capture_output=True, text=True, timeout=LIMIT, check=True
        )
        return done.stdout.split("\n")[:-1]

    assert said("at once") == ["exit handler"]
    assert said("as usual") == ["exit handler", "taken apart"]
