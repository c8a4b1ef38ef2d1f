"""Runs this folder's reference programs with the packed environment's interpreter: what answers are compared with."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.serving import CPU_ENVIRONMENT
from support.starts import IN_PROCESS, note_start
from vllm_env.base.cache import cache_root

if TYPE_CHECKING:
    from collections.abc import Callable

_FOLDER = Path(__file__).parent
_ENGINES = {"reference_engine.py"}  # the programs that start one
ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


def kept_reference(environment: Path, program: str, request: Any, model: Path) -> Any:
    """Return what `run_reference` returns, computed once for the same program, packages, model and request.

    Args:
        environment: the folder with ``bin/python``.
        program: file name; its answer depends on nothing else than the rest.
        request: what it reads; names `model`.
        model: the model's folder, which counts by its files.
    """
    return kept(environment, program, request, model, lambda: run_reference(environment, program, request))


def kept(environment: Path, program: str, request: Any, model: Path, make: Callable[[], Any]) -> Any:
    """Return what ``make`` returned (JSON types) for the same program, packages, model and request, now or in an earlier run."""
    packages = sorted(path.name for path in environment.glob("lib/python3.*/site-packages/*.dist-info"))
    asked = json.dumps(request, sort_keys=True).replace(str(model), _digest(*sorted(p for p in model.rglob("*") if p.is_file())))
    key = hashlib.sha256("\0".join([_digest(_FOLDER / program), asked, *packages]).encode()).hexdigest()[:32]
    place = cache_root() / "references" / f"{key}.json"
    if not place.is_file():
        place.parent.mkdir(parents=True, exist_ok=True)
        made = place.with_suffix(f".{os.getpid()}")
        made.write_text(json.dumps(make()), encoding="utf-8")
        made.replace(place)
    return json.loads(place.read_text(encoding="utf-8"))


def _digest(*files: Path) -> str:
    found = hashlib.sha256()
    for file in files:
        found.update(file.name.encode() + b"\0" + file.read_bytes())
    return found.hexdigest()


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
    if program in _ENGINES:
        note_start(IN_PROCESS)
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
