"""Set up the embedded interpreter: import path, child processes, exit, threads and collector."""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

SWITCH_INTERVAL_S = 0.001
"""How long a sender may wait for the interpreter's lock after its handshake.

Python's default is 5 ms.
"""


def import_nothing_of_the_working_directory() -> None:
    """Keep Python from importing modules of the server's working directory.

    If that directory contains a checkout of vLLM or a folder named ``triton``, Python would import
    it instead of the environment's.
    """
    # The stub's embedded interpreter has an empty entry first in ``sys.path``.
    sys.path[:] = [entry for entry in sys.path if entry]
    # So have `python -c` and `python -m`, with which vLLM starts processes. Python 3.11 and later
    # know this variable.
    os.environ.setdefault("PYTHONSAFEPATH", "1")


def use_environment_python() -> None:
    """Make child processes use the environment's interpreter."""
    # An embedded Python may guess its own path wrongly.
    python = Path(sys.prefix, "bin", "python")
    if python.exists() and Path(sys.executable or "/").parent != python.parent:
        sys.executable = str(python)
    multiprocessing.set_executable(sys.executable)


def end_at_once() -> None:
    """End this process as soon as all exit handlers have run.

    Call it before other exit handlers are registered.
    """
    # Python would first take torch's modules apart, which takes 3 to 10 s on two busy cores. An
    # unload would wait for it. A stopping server waits for one instance after the other, and gives
    # all of them 30 s.

    # Exit handlers run in reverse order, so the first one registered runs last.
    atexit.register(_end)


def _end() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    # This is safe: the stub has taken down its own objects before the interpreter ends.
    os._exit(0)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Keep the garbage collector from visiting what an import makes."""
    # 97 of 100 objects of vLLM's import live as long as the process. The other 17,000 are never
    # freed, which makes no difference to its 528 MB. On two cores, the import and the next
    # collection took 9.6 s of CPU time in this way, and 10.7 s otherwise (vLLM 0.32).
    gc.disable()
    try:
        yield
    finally:
        # Later collections leave out what exists now.
        gc.freeze()
        gc.enable()


def tune() -> None:
    """Set the garbage collector and the switch interval for serving; call it after the load."""
    # All objects that exist now live as long as the model, so the collector need not visit them
    # again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 50, 50)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
