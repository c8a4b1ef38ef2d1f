"""Inspect the model's class without another import of vLLM.

vLLM inspects a model's class in a new interpreter, so that its own process does not initialize
CUDA. It keeps the answer among its caches. So the first start on a machine imports vLLM again.

On a CPU, no process initializes CUDA, and this process inspects the class itself. For a GPU, a fork
of this process inspects it. A fork need not import vLLM, because this process has done so.
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
    from triton_vllm.base.protocols import Log

REGISTRY_MODULE = "vllm.model_executor.models.registry"
FORK_S = 120.0
"""The longest time that a fork may take, s. A fork of a process with threads can hang. On an H100,
it took less than 2 s."""


def replace_inspection(
    log: Log, *, in_fork: bool, registry: str = REGISTRY_MODULE, command: list[str] | None = None
) -> None:
    """Make vLLM inspect a class in this process or in a fork of it.

    If a fork fails, vLLM starts its own process, which reports the error.

    Args:
        log: reports that a fork has failed.
        in_fork: whether a fork inspects the class.
        registry: vLLM's module.
        command: the command that vLLM runs for an inspection.
    """
    expected = command or [sys.executable, "-m", REGISTRY_MODULE]
    owner = os.getpid()

    def run(given: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        """Do an inspection here or in a fork; pass any other call on to ``subprocess.run``."""
        is_known = given == expected and options.keys() == {"input", "capture_output"}
        # If EngineCore is a fork, it has this function, too. It may have initialized CUDA, so it
        # runs vLLM's command.
        if is_known and os.getpid() == owner:
            if not in_fork:
                _answer(options["input"])
                return subprocess.CompletedProcess(given, 0, b"", b"")
            if _may_fork():
                if _answer_in_fork(options["input"]):
                    return subprocess.CompletedProcess(given, 0, b"", b"")
                log.warning("a fork could not inspect the model's class: vLLM starts a process")
        # No `check`: vLLM looks at the status itself.
        return subprocess.run(given, **options)  # noqa: PLW1510

    # Patch inspection: vLLM starts an interpreter for it, which imports vLLM (0.11 to 0.33;
    # model_executor/models/registry.py, _run_in_subprocess; issue 19317 of vLLM, open). That took
    # 7.3 to 8.0 s of CPU time, and here 0.9 (29 November 2026). It may go when vLLM has an option
    # for it. Without these names, vLLM starts its own process.
    with contextlib.suppress(ImportError):
        names = vars(importlib.import_module(registry))
        is_same = names.get("_SUBPROCESS_COMMAND") == expected
        if is_same and names.get("subprocess") is subprocess:
            # vLLM sees a module `subprocess` in which only `run` differs.
            names["subprocess"] = SimpleNamespace(**{**vars(subprocess), "run": run})


def _answer(question: bytes) -> None:
    """Inspect a class as vLLM's ``_run`` does it.

    Args:
        question: vLLM's input for its process, a pickled function and the file for its result.
    """
    inspect, output = pickle.loads(question)  # noqa: S301 - of this process
    Path(output).write_bytes(pickle.dumps(inspect()))


def _may_fork() -> bool:
    """Return False if CUDA does not allow a fork, or the operator has chosen against it."""
    # vLLM does not fork EngineCore in these cases either.
    if os.environ.get("VLLM_WORKER_MULTIPROC_METHOD") == "spawn":
        return False
    torch = sys.modules.get("torch")
    return torch is None or not torch.cuda.is_initialized()


def _answer_in_fork(question: bytes) -> bool:
    """Return whether a fork of this process has inspected the class and written the answer."""
    fork = multiprocessing.get_context("fork").Process(target=_try_to_answer, args=(question,))
    try:
        fork.start()
    except OSError:
        return False
    try:
        fork.join(FORK_S)
    finally:
        # It hangs, or the load was interrupted.
        if fork.exitcode is None:
            fork.kill()
            fork.join()
    return fork.exitcode == 0


def _try_to_answer(question: bytes) -> None:
    try:
        _answer(question)
    # vLLM's own process will report it.
    except Exception:  # noqa: BLE001
        sys.exit(1)
