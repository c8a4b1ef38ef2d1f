"""What the benchmarks share: shapes without weights, servers, load generators, process accounting, reports.

Any `python3` starts a benchmark: one that lacks tritonclient is replaced by a Python that gen_vllm_env.sh has made for itself.
"""

import contextlib
import importlib.util
import os
import sys
from pathlib import Path

_BENCHMARKS = Path(__file__).resolve().parents[1]
_TRIED = "VLLM_ENV_BENCHMARK_TRIED"


def _use_tools_environment() -> None:
    """Start the benchmark again, under each of the project's own Pythons once, the newest first."""
    found = _BENCHMARKS.parent.glob(".tools/venv*/bin/python")
    tried = os.environ.get(_TRIED, "").split(os.pathsep)
    for python in map(str, sorted(found, key=lambda p: p.lstat().st_mtime, reverse=True)):
        if python not in tried:
            tried.append(python)
            with contextlib.suppress(OSError):
                environment = {**os.environ, _TRIED: os.pathsep.join(tried)}
                os.execve(python, [python, *sys.argv], environment)


if importlib.util.find_spec("tritonclient") is None and Path(sys.argv[0]).resolve().parent == _BENCHMARKS:
    _use_tools_environment()
