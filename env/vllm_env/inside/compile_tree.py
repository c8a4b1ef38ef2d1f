"""Compiles Python sources of a folder to bytecode, with the environment's own interpreter.

    python -S compile_tree.py FOLDER NEUTRAL_PREFIX CHUNKS.json WORKERS

CHUNKS.json is a list of lists of files, relative to FOLDER. The bytecode names its sources below
NEUTRAL_PREFIX, so it is the same wherever the environment is built. The import system replaces the
name by the real one. Sources that do not compile get no bytecode, as with pip.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import multiprocessing.connection
import os
import py_compile
import signal
import sys
import warnings
from typing import Any

_PR_SET_PDEATHSIG = 1  # prctl(2): a signal for this process when its parent ends


def compile_files(prefix: str, neutral: str, files: list[str]) -> None:
    """Compile files, named relative to the folder ``prefix``; end if the parent process ends.

    The bytecode names them below the folder ``neutral``.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    warnings.simplefilter("ignore")
    for file in files:
        # A source that does not compile gets no bytecode; nor does a link that leads nowhere.
        # Another OSError, of a full disk, ends the build.
        expected = (py_compile.PyCompileError, FileNotFoundError, ValueError, RecursionError)
        with contextlib.suppress(*expected):
            # dfile is the source's name in the bytecode.
            py_compile.compile(
                os.path.join(prefix, file),
                dfile=os.path.join(neutral, file),
                doraise=True,
                invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP,
            )


def main() -> None:
    """Compile in chunks and print the progress: ``DONE TOTAL`` on a line after each chunk."""
    prefix, neutral, job, workers = sys.argv[1:]
    with open(job, encoding="utf-8") as stream:
        waiting = json.load(stream)
    total = sum(map(len, waiting))
    context = multiprocessing.get_context("fork")
    # Each process and its number of files, by the handle that becomes ready when it ends.
    running: dict[Any, Any] = {}
    finished = 0
    while waiting or running:
        # Each chunk has a new process: files that a process has compiled before change the bytecode
        # (_CHUNK_FILES in prefix/bytecode.py).
        while len(running) < int(workers) and waiting:
            chunk = waiting.pop(0)
            worker = context.Process(target=compile_files, args=(prefix, neutral, chunk))
            worker.start()
            running[worker.sentinel] = worker, len(chunk)
        for sentinel in multiprocessing.connection.wait(running):
            worker, size = running.pop(sentinel)
            worker.join()
            if worker.exitcode:
                sys.exit(f"a process that compiled ended with status {worker.exitcode}")
            finished += size
            sys.stdout.write(f"{finished} {total}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
