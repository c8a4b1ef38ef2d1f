"""Where a model's process and its children import from, and how a stub of several ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


CHILDREN = """
import subprocess, sys
sys.path[:0] = ["", sys.argv[1]]
from triton_vllm.startup import interpreter
if sys.argv[2] == "nothing":
    interpreter.import_nothing_of_the_working_directory()
try:
    import beside
    print("imported")
except ImportError:
    print("not found")
sys.stdout.flush()
subprocess.run([sys.executable, "-c", "import beside; print('imported')"], stderr=subprocess.DEVNULL)
subprocess.run([sys.executable, "-m", "beside"], stderr=subprocess.DEVNULL)
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="an older Python does not know PYTHONSAFEPATH")
def test_nothing_is_imported_from_the_working_directory(tmp_path):
    """Not by this process, whose embedded interpreter looks there first, nor by those that it starts."""
    (tmp_path / "beside.py").write_text("print('run') if __name__ == '__main__' else None\n", encoding="utf-8")
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}

    def said(how):
        command = [sys.executable, "-c", CHILDREN, MODEL, how]
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=LIMIT, check=True)
        return done.stdout.split("\n")[:-1]

    assert said("nothing") == ["not found"]
    assert said("as usual") == ["imported", "imported", "run"]
