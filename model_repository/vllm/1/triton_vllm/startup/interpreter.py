"""Set up the embedded interpreter: where it imports from, what vLLM's processes run, how its threads and its collector work."""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing
import os
import sys
from pathlib import Path

SWITCH_INTERVAL_S = 0.001
"""A sender that comes back from its handshake waits that long for the event loop to let it go on (Python's default is 5 ms)."""


def import_nothing_of_the_working_directory() -> None:
    """Leave the folder in which the server was started out of the module search path, of vLLM's processes too.

    The stub's embedded interpreter begins `sys.path` with an empty entry, and so does each `python -c` and `python -m`, by which
    vLLM starts processes: beside a checkout of vLLM or a folder named `triton` that would be what is imported. Python 3.11
    and later know the variable.
    """
    sys.path[:] = [entry for entry in sys.path if entry]
    os.environ.setdefault("PYTHONSAFEPATH", "1")


def use_environment_python() -> None:
    """Point spawned children at the environment's interpreter: embedded, Python may guess its own path wrongly."""
    python = Path(sys.prefix) / "bin" / "python"
    if python.exists() and Path(sys.executable or "/").parent != python.parent:
        sys.executable = str(python)
    multiprocessing.set_executable(sys.executable)


def end_at_once() -> None:
    """Have this process end as soon as all exit handlers have run; call it before what registers them is imported.

    To take torch's modules apart takes 3 to 10 s on two busy cores, for which an unload and a server that ends would wait; a
    server waits for one instance after the other, and gives all of them 30 s.
    """
    atexit.register(_end)


def _end() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(0)  # the stub has taken its own objects down before the interpreter ends


def tune() -> None:
    """Set the collector and the switch interval for serving; call it once the model is loaded."""
    # What exists now lives as long as the model; the collector need not walk it again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 50, 50)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
