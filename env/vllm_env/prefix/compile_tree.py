"""Compiles every Python source below a folder to bytecode; run by the environment's own interpreter.

    python -I compile_tree.py FOLDER NEUTRAL_PREFIX WORKERS

The bytecode names sources below NEUTRAL_PREFIX, so that it does not depend on where the environment was built (the
import system replaces the name by the real one). Sources that do not compile are left alone, as pip does.
Each file starts a fresh marshal of code that nothing else holds, in workers that hold nothing, so that equal sources
give equal bytecode.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import os
import py_compile
import signal
import sys
import warnings

_CHUNK = 64


def compile_files(prefix: str, neutral: str, files: list[str]) -> int:
    """Compile files given relative to ``prefix``; return how many were compiled."""
    warnings.simplefilter("ignore")
    done = 0
    for file in files:
        try:
            py_compile.compile(
                os.path.join(prefix, file),
                dfile=os.path.join(neutral, file),
                doraise=True,
                invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP,
            )
            done += 1
        except (py_compile.PyCompileError, OSError, ValueError, RecursionError):
            continue
    return done


def sources(prefix: str) -> list[str]:
    """Return the sources below ``prefix/lib``, relative to ``prefix`` and sorted."""
    found = []
    for folder, _, files in os.walk(os.path.join(prefix, "lib")):
        found += [os.path.relpath(os.path.join(folder, f), prefix) for f in files if f.endswith(".py")]
    return sorted(found)


def _die_with_parent() -> None:
    """A worker holds both ends of its pool's pipe, so it would wait forever for a parent that was killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG, prctl(2)


def main() -> None:
    """Compile in chunks and print the progress: ``DONE TOTAL`` on a line after each chunk."""
    prefix, neutral, workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
    files = sources(prefix)
    chunks = [files[i : i + _CHUNK] for i in range(0, len(files), _CHUNK)]
    done = 0
    with concurrent.futures.ProcessPoolExecutor(workers, initializer=_die_with_parent) as pool:
        futures = [pool.submit(compile_files, prefix, neutral, chunk) for chunk in chunks]
        for number, future in enumerate(futures):  # no zip(strict=): this also runs on Python 3.9
            future.result()
            done += len(chunks[number])
            sys.stdout.write(f"{done} {len(files)}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
