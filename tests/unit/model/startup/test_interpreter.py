"""Where a model's process and its children import from, and how a stub of several ends."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.fake_log import FakeLog
from support.patience import LIMIT
from triton_vllm import vllm_api
from triton_vllm.startup import inspector, prepare

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


@pytest.mark.parametrize("fault", [None, ImportError("no such module")])
def test_an_import_is_not_collected_and_what_follows_is(fault):
    """Also if the import fails: the model's process may go on."""
    program = """
import gc, sys
sys.path.insert(0, sys.argv[1])
from triton_vllm.startup import interpreter
try:
    with interpreter.importing():
        print(gc.isenabled(), gc.get_freeze_count())
        if sys.argv[2]:
            raise ImportError(sys.argv[2])
except ImportError as error:
    print(error)
print(gc.isenabled(), gc.get_freeze_count() > 0)
"""
    command = [sys.executable, "-c", program, MODEL, str(fault or "")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True)
    assert done.stdout.split("\n")[:-1] == ["False 0", *([str(fault)] if fault else []), "True True"]


@pytest.mark.parametrize("on_cpu", [True, False])
def test_vllm_is_imported_without_the_collector(monkeypatch, on_cpu):
    """Its import makes half a million objects that live as long as the process. For a GPU, a fork inspects the class."""
    replaced = []
    monkeypatch.setattr(inspector, "replace_inspection", lambda log, *, in_fork: replaced.append(in_fork))
    monkeypatch.setattr(vllm_api, "runs_on_cpu", lambda: on_cpu)
    monkeypatch.setattr(vllm_api, "load", lambda: SimpleNamespace(version=gc.isenabled(), path="here"))
    log = FakeLog()
    prepare._import(log)
    assert log.infos == ["vLLM False from here"]
    assert replaced == [not on_cpu]


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
