"""Compiles every Python source below a folder to bytecode; run by the environment's own interpreter.

    python -I compile_tree.py FOLDER NEUTRAL_PREFIX WORKERS

The bytecode names sources below NEUTRAL_PREFIX, so that it does not depend on where the environment was built (the
import system replaces the name by the real one). Sources that do not compile are left alone, as pip does.
Each chunk has a process of its own: marshal marks a string by how often the process holds it, so that what was compiled
before shows in the bytecode (seen: one file in 25,000 differed between two builds, with the load of the machine).
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

_CHUNK = 64


def compile_files(prefix: str, neutral: str, files: list[str]) -> None:
    """Compile files given relative to ``prefix``, and end with the process that started this one."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG, prctl(2)
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
    found = []
    for folder, _, files in os.walk(os.path.join(prefix, "lib")):
        found += [
            os.path.relpath(os.path.join(folder, f), prefix) for f in files if f.endswith(".py")
        ]
    return sorted(found)


def main() -> None:
    """Compile in chunks and print the progress: ``DONE TOTAL`` on a line after each chunk."""
    prefix, neutral, workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
    files, context = sources(prefix), multiprocessing.get_context("fork")
    running: dict[Any, Any] = {}
    begun = done = 0
    while done < len(files):
        while len(running) < workers and begun < len(files):
            worker = context.Process(
                target=compile_files, args=(prefix, neutral, files[begun : begun + _CHUNK])
            )
            worker.start()
            running[worker.sentinel], begun = worker, begun + _CHUNK
        for ended in multiprocessing.connection.wait(running):
            running[ended].join()
            if status := running.pop(ended).exitcode:
                sys.exit(f"a process that compiled ended with status {status}")
            done = min(done + _CHUNK, len(files))
            sys.stdout.write(f"{done} {len(files)}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
