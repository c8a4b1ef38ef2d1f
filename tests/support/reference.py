"""Runs this folder's reference programs with the packed environment's interpreter: what answers are compared with."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from support.serving import CPU_ENVIRONMENT

_FOLDER = Path(__file__).parent
ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


def run_reference(environment: Path, program: str, request: Any, *, timeout: float = 300.0) -> Any:
    """Run a program of ``tests/support`` in an unpacked environment; return the JSON that it wrote.

    Args:
        environment: the folder with ``bin/python``.
        program: file name; it is called with a JSON file to read and one to write.
        request: what it reads.
        timeout: seconds.

    Raises:
        RuntimeError: the program failed; the message ends with what it printed.
    """
    with tempfile.TemporaryDirectory(prefix="vllm_env_test_") as folder:
        given, made = Path(folder, "request.json"), Path(folder, "answer.json")
        given.write_text(json.dumps(request), encoding="utf-8")
        done = subprocess.run(
            [environment / "bin" / "python", _FOLDER / program, given, made],
            env={**os.environ, **CPU_ENVIRONMENT, **ONE_THREAD, "PYTHONPATH": ""},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{program} ended with {done.returncode}:\n{done.stderr[-4000:]}")
        return json.loads(made.read_text(encoding="utf-8"))
