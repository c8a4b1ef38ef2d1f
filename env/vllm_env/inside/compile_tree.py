"""Compiles every Python source below a folder to bytecode, with the environment's own interpreter.

    python -S compile_tree.py FOLDER NEUTRAL_PREFIX WORKERS

The bytecode names its sources below NEUTRAL_PREFIX, so it is the same wherever the environment is
built. The import system replaces the name by the real one. Sources that do not compile get no
bytecode, as with pip.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import multiprocessing.connection
import os
import py_compile
import signal
import sys
import warnings
from typing import Any

_CHUNK = 64  # sources
_PR_SET_PDEATHSIG = 1  # prctl(2): a signal for this process when its parent ends


def compile_files(prefix: str, neutral: str, files: list[str]) -> None:
    """Compile files, named relative to ``prefix``; end if the parent process ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    warnings.simplefilter("ignore")
    for file in files:
        with contextlib.suppress(py_compile.PyCompileError, OSError, ValueError, RecursionError):
            py_compile.compile(
                os.path.join(prefix, file),
                dfile=os.path.join(neutral, file),
                doraise=True,
                invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP,
            )


def sources(prefix: str) -> list[str]:
    """Return the sources below ``prefix/lib``, relative to ``prefix`` and sorted."""
    paths = []
    for folder, _, files in os.walk(os.path.join(prefix, "lib")):
        inner = os.path.relpath(folder, prefix)
        paths += [os.path.join(inner, file) for file in files if file.endswith(".py")]
    return sorted(paths)


def main() -> None:
    """Compile in chunks and print the progress: ``DONE TOTAL`` on a line after each chunk."""
    prefix, neutral, workers = sys.argv[1:]
    files = sources(prefix)
    context = multiprocessing.get_context("fork")
    running: dict[Any, Any] = {}
    started = 0
    finished = 0
    while finished < len(files):
        # Each chunk has a new process. marshal marks a string by how often the process holds it, so
        # earlier files show in the bytecode: one file in 25,000 differed between two builds.
        while len(running) < int(workers) and started < len(files):
            chunk = files[started : started + _CHUNK]
            worker = context.Process(target=compile_files, args=(prefix, neutral, chunk))
            worker.start()
            running[worker.sentinel] = worker
            started += _CHUNK
        for sentinel in multiprocessing.connection.wait(running):
            worker = running.pop(sentinel)
            worker.join()
            if worker.exitcode:
                sys.exit(f"a process that compiled ended with status {worker.exitcode}")
            finished = min(finished + _CHUNK, len(files))
            sys.stdout.write(f"{finished} {len(files)}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
