"""The process started ahead for vLLM's look at the model's class, with real processes and a registry like vLLM's."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from triton_vllm import inspector
from triton_vllm.inspector import Inspector

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

# As vLLM's registry.py: the question goes to stdin of a process that says on stdout what it has made of it.
_REGISTRY = """
import subprocess, sys
_SUBPROCESS_COMMAND = {command!r}
def inspect(question):
    return subprocess.run(_SUBPROCESS_COMMAND, input=question, capture_output=True)
"""
_ANSWER = "import os, sys; print(os.getpid(), sys.stdin.read())"


def _command(code: str = _ANSWER) -> list[str]:
    return [sys.executable, "-c", code]


def _registry(folder: Path, command: list[str]) -> ModuleType:
    file = folder / "registry.py"
    file.write_text(_REGISTRY.format(command=command))
    spec = importlib.util.spec_from_file_location("registry", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def ahead() -> Inspector:
    """A process that waits for a question."""
    return Inspector(_command())


def _pid(ahead: Inspector) -> int:
    assert ahead._process is not None
    return ahead._process.pid


def test_the_first_question_goes_to_the_process_that_is_there(ahead: Inspector, tmp_path: Path) -> None:
    """The registry gets the answer of the process that was started ahead, and the next time that of a new one."""
    registry, pid = _registry(tmp_path, _command()), _pid(ahead)
    ahead.lend(registry)
    first, second = registry.inspect(b"one"), registry.inspect(b"two")
    assert first.stdout.split() == [str(pid).encode(), b"one"]
    assert second.stdout.split()[1] == b"two"
    assert second.stdout.split()[0] != str(pid).encode()
    assert (first.returncode, first.stderr) == (0, b"")


def test_another_question_is_left_alone(ahead: Inspector, tmp_path: Path) -> None:
    """A registry that runs another command keeps the module `subprocess`."""
    registry = _registry(tmp_path, _command("print('another')"))
    ahead.lend(registry)
    assert registry.subprocess is subprocess
    ahead.close()


def test_a_registry_without_these_names_is_left_alone(ahead: Inspector, tmp_path: Path) -> None:
    """A vLLM that does it in another way is not touched."""
    registry = _registry(tmp_path, _command())
    del registry._SUBPROCESS_COMMAND
    ahead.lend(registry)
    assert registry.subprocess is subprocess
    ahead.close()


def test_the_rest_of_subprocess_is_there(ahead: Inspector, tmp_path: Path) -> None:
    """What else the registry takes from the module is the module's."""
    registry = _registry(tmp_path, _command())
    ahead.lend(registry)
    assert registry.subprocess.PIPE == subprocess.PIPE
    assert registry.subprocess.CalledProcessError is subprocess.CalledProcessError
    ahead.close()


def test_an_unneeded_process_is_ended(ahead: Inspector) -> None:
    """Nothing is left of a process that nobody has asked."""
    process = ahead._process
    ahead.close()
    ahead.close()
    assert process is not None
    assert process.returncode == -9


@pytest.mark.parametrize(
    "code", ["raise SystemExit(3)", "import os; os.kill(os.getpid(), 9)", "import sys; sys.stdin.read(); 1/0"]
)
def test_a_process_that_failed_is_made_up_for(tmp_path: Path, code: str) -> None:
    """vLLM gets the answer of a process of its own when the one started ahead has failed."""
    ahead = Inspector(_command(code))
    ahead._command = _command()
    registry = _registry(tmp_path, _command())
    ahead.lend(registry)
    assert registry.inspect(b"x" * 1_000_000).stdout.split()[1] == b"x" * 1_000_000


def test_a_process_is_started_only_without_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any answer in vLLM's caches means that this is no first start; the caches are where vLLM looks for them."""
    monkeypatch.setattr(inspector, "Inspector", list)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    places = {
        "VLLM_CACHE_ROOT": (tmp_path / "root", tmp_path / "root"),
        "XDG_CACHE_HOME": (tmp_path / "xdg", tmp_path / "xdg/vllm"),
        "OTHER": (tmp_path, tmp_path / "home/.cache/vllm"),
    }
    for name, (value, cache) in places.items():
        environment = {name: str(value)}
        assert inspector.start(environment) == [sys.executable, "-m", inspector.REGISTRY]
        (cache / "modelinfos").mkdir(parents=True)
        assert inspector.start(environment) is not None
        (cache / "modelinfos/vllm-model.json").touch()
        assert inspector.start(environment) is None


def test_a_machine_that_starts_no_processes_is_no_reason_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be started ahead is left to vLLM."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    assert inspector.start({"VLLM_CACHE_ROOT": str(tmp_path)}) is None
