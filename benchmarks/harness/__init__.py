"""The parts that the benchmarks share: model shapes, servers, loads, process figures and reports.

Any ``python3`` can start a benchmark. If it lacks tritonclient, a Python that gen_vllm_env.sh has
made takes over. The measuring itself is the client's: ``client/loadtest``.
"""

import contextlib
import importlib.util
import os
import sys
from pathlib import Path

_BENCHMARKS = Path(__file__).resolve().parents[1]
# Passed on to the next Python. It names those that were tried, so that none is started twice.
_TRIED = "VLLM_ENV_BENCHMARK_TRIED"

# `loadtest` is next to the client. The engine's worker, which another Python runs, needs it, too.
sys.path.insert(0, str(_BENCHMARKS.parent / "client"))


def _use_tools_environment() -> None:
    """Replace this process by the benchmark under a Python that the project has made.

    It returns only if no such Python can be started.
    """
    pythons = _BENCHMARKS.parent.glob(".tools/venv*/bin/python")
    tried = os.environ.get(_TRIED, "").split(os.pathsep)
    # The newest first. lstat(), because the link itself may lead nowhere.
    for path in sorted(pythons, key=lambda path: path.lstat().st_mtime, reverse=True):
        python = str(path)
        if python not in tried:
            tried.append(python)
            # A container may have made it, as a link to a program that is missing here.
            with contextlib.suppress(OSError):
                environment = {**os.environ, _TRIED: os.pathsep.join(tried)}
                os.execve(python, [python, *sys.argv], environment)


# A test, or the engine's worker in a packed environment, must not be replaced by another program.
_is_benchmark = Path(sys.argv[0]).resolve().parent == _BENCHMARKS
if _is_benchmark and importlib.util.find_spec("tritonclient") is None:
    _use_tools_environment()
