"""Inspect the model's class without another import of vLLM.

vLLM inspects a model's class in a new interpreter, so that its own process does not initialize
CUDA. It keeps the answer among its caches. So the first start on a machine imports vLLM once more.

On a CPU, no process initializes CUDA, and this process inspects the class itself. For a GPU, a fork
of this process does so, which has vLLM imported.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

REGISTRY = "vllm.model_executor.models.registry"
FORK_S = 60.0
"""The longest time that a fork may take, s. A fork of a process with threads can hang."""


def inspect_here(
    *, in_fork: bool, registry: str = REGISTRY, command: list[str] | None = None
) -> None:
    """Make vLLM inspect a class in this process or in a fork of it.

    If a fork fails, vLLM starts its own process, which reports what is wrong.

    Args:
        in_fork: whether a fork inspects the class.
        registry: vLLM's module.
        command: the command that vLLM runs for an inspection.
    """
    expected = command or [sys.executable, "-m", REGISTRY]
    owner = os.getpid()

    def run(given: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        is_known = given == expected and options.keys() == {"input", "capture_output"}
        # EngineCore has this function, too, if it is a fork. It may have initialized CUDA.
        if is_known and os.getpid() == owner:
            # As vLLM's `_run` does it: the input is a function and the file for its result.
            inspect, output = pickle.loads(options["input"])  # noqa: S301 - of this process
            if in_fork:
                is_done = _succeeds_in_fork(inspect, output)
            else:
                _write(inspect, output)
                is_done = True
            if is_done:
                return subprocess.CompletedProcess(given, 0, b"", b"")
        # vLLM looks at the status itself.
        return subprocess.run(given, **options)  # noqa: PLW1510

    # Every vLLM from 0.11 to 0.33 has these names (read in their registry.py). Without them, vLLM
    # starts its own process.
    with contextlib.suppress(ImportError):
        names = vars(importlib.import_module(registry))
        is_same = names.get("_SUBPROCESS_COMMAND") == expected
        if is_same and names.get("subprocess") is subprocess:
            # vLLM sees a module `subprocess` in which only `run` differs.
            names["subprocess"] = SimpleNamespace(**{**vars(subprocess), "run": run})


def _write(inspect: Callable[[], Any], output: str) -> None:
    Path(output).write_bytes(pickle.dumps(inspect()))


def _succeeds_in_fork(inspect: Callable[[], Any], output: str) -> bool:
    """Return whether a fork of this process has inspected the class and written the answer."""

    def try_to_write() -> None:
        try:
            _write(inspect, output)
        # vLLM's own process will report it.
        except Exception:  # noqa: BLE001
            sys.exit(1)

    # vLLM starts EngineCore in the same way, if CUDA is not initialized.
    fork = multiprocessing.get_context("fork").Process(target=try_to_write)
    try:
        fork.start()
    except OSError:
        return False
    fork.join(FORK_S)
    if fork.exitcode is None:
        fork.kill()
        fork.join()
    return fork.exitcode == 0
