"""What answers are compared with: this folder's reference programs, run by the packed environment's interpreter.

Each costs seconds, so its answers are kept on disk, in ``references/`` of the folder that ``VLLM_ENV_TEST_DATA`` names
(default: ``.tools/test-data`` of the checkout). Models that the tests make are next to it (`models.py`).

An entry counts for the same request, model files, program, package versions and kind of processor only. It is written
when the reference has ended without an error, and appears whole or not at all. With ``--slow`` a run takes no entry that
an earlier run has made, and replaces it. To make all of them again, remove the folder.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.once import run_folder
from support.repositories import data_folder
from support.serving import CPU_ENVIRONMENT
from support.starts import IN_PROCESS, note_start
from vllm_env.base.locks import locked

if TYPE_CHECKING:
    from collections.abc import Callable

FRESH = "VLLM_ENV_TEST_FRESH"
"""The variable that is set in a run which takes no earlier run's references."""
_ENGINES = {"reference_engine.py"}  # the programs that start one
ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
_FOLDER = Path(__file__).parent


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
    place = place_of(environment, program, request, model)
    made_now = run_folder() / f"reference-{place.stem}"
    with locked(made_now.with_suffix(".lock"), lambda: None):
        if not place.is_file() or (FRESH in os.environ and not made_now.exists()):
            answer = json.dumps(make())
            place.parent.mkdir(parents=True, exist_ok=True)
            made = place.with_suffix(f".{os.getpid()}")
            made.write_text(answer, encoding="utf-8")
            made.replace(place)
            made_now.touch()
        return json.loads(place.read_text(encoding="utf-8"))


def place_of(environment: Path, program: str, request: Any, model: Path) -> Path:
    """Return the file in which `kept` keeps an answer."""
    asked = json.dumps(request, sort_keys=True).replace(str(model), files_digest(model))
    ran = [
        file_digest(_FOLDER / program),
        files_digest(model),
        *(f"{k}={v}" for k, v in {**CPU_ENVIRONMENT, **ONE_THREAD}.items()),
    ]
    key = hashlib.sha256("\0".join([*ran, asked, *packages(environment), processor()]).encode()).hexdigest()[:32]
    return data_folder() / "references" / f"{key}.json"


def packages(environment: Path) -> list[str]:
    """Return the names and versions of the packages of an environment."""
    return sorted(path.name for path in environment.glob("lib/python3.*/site-packages/*.dist-info"))


@functools.cache
def processor() -> str:
    """Return what libraries choose their kernels by: with others, numbers differ in their last digits."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line for line in lines if line.startswith("flags")), "")


def files_digest(folder: Path) -> str:
    """Return a digest of the files below a folder: their names and contents."""
    found = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        found.update(f"{file.relative_to(folder)} {file_digest(file)}\0".encode())
    return found.hexdigest()


def file_digest(file: Path) -> str:
    """Return a digest of a file's content."""
    state = file.stat()
    return _content_digest(file, state.st_size, state.st_mtime_ns)


@functools.cache
def _content_digest(file: Path, size: int, changed: int) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


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
