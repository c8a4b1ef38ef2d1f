"""Shared by the benchmarks: model shapes without weights, servers, load generators, process accounting and reports.

A benchmark can be started with any ``python3``. If it lacks tritonclient, a Python that gen_vllm_env.sh has made takes over.
"""

import contextlib
import importlib.util
import os
import sys
from pathlib import Path

_BENCHMARKS = Path(__file__).resolve().parents[1]
# Names the Pythons that were tried already, so that each one is started at most once.
_TRIED = "VLLM_ENV_BENCHMARK_TRIED"


def _use_tools_environment() -> None:
    """Start the benchmark again with the project's own Pythons, each at most once, the newest first."""
    found = _BENCHMARKS.parent.glob(".tools/venv*/bin/python")
    tried = os.environ.get(_TRIED, "").split(os.pathsep)
    for python in map(str, sorted(found, key=lambda p: p.lstat().st_mtime, reverse=True)):
        if python not in tried:
            tried.append(python)
            with contextlib.suppress(OSError):
                environment = {**os.environ, _TRIED: os.pathsep.join(tried)}
                os.execve(python, [python, *sys.argv], environment)


if (
    importlib.util.find_spec("tritonclient") is None
    and Path(sys.argv[0]).resolve().parent == _BENCHMARKS
):
    _use_tools_environment()
