"""vLLM's look at the model's class, with real processes and a registry like vLLM's."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import select
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from support.fake_log import FakeLog
from triton_vllm.startup import inspector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

# As vLLM's registry.py: the question goes to stdin of a process.
_REGISTRY = """
import subprocess, sys
_SUBPROCESS_COMMAND = {command!r}
def inspect(question):
    return subprocess.run(_SUBPROCESS_COMMAND, input=question, capture_output=True)
"""
_OWN = b"vLLM's own process"


def _command(code: str = f"import sys; sys.stdin.buffer.read(); print({_OWN.decode()!r})") -> list[str]:
    return [sys.executable, "-c", code]


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A registry whose command says so when it runs."""
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    (tmp_path / "registry_like.py").write_text(_REGISTRY.format(command=_command()))
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("registry_like")
    del sys.modules["registry_like"]


@pytest.fixture
def answer(tmp_path: Path) -> Path:
    """The file for the answer."""
    return tmp_path / "answer"


def _replace(*, in_fork: bool) -> FakeLog:
    log = FakeLog()
    inspector.replace_inspection(log, in_fork=in_fork, registry="registry_like", command=_command())
    return log


def _ask(registry: ModuleType, function: Callable[[], Any], answer: Path) -> bytes:
    done = registry.inspect(pickle.dumps((function, str(answer))))
    assert done.returncode == 0
    return bytes(done.stdout.strip())


def _fail() -> None:
    raise ImportError("no such library")


def _hang() -> None:
    select.select([], [], [], 600)


def _die() -> None:
    os._exit(7)


def test_for_a_gpu_a_fork_inspects_the_class(registry: ModuleType, answer: Path) -> None:
    """The answer is the fork's, and nothing of it is left."""
    _replace(in_fork=True)
    for name in ("one", "two"):
        assert _ask(registry, os.getpid, answer.with_name(name)) == b""
    forks = [pickle.loads(answer.with_name(name).read_bytes()) for name in ("one", "two")]
    assert len({*forks, os.getpid()}) == 3
    assert not [pid for pid in forks if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("function", [_fail, _hang, _die])
def test_a_fork_that_fails_is_made_up_for(
    registry: ModuleType, answer: Path, function: Callable[[], None], monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """vLLM's own process then answers, or says what is wrong. The fork prints no error."""
    monkeypatch.setattr(inspector, "FORK_S", 0.5 if function is _hang else 60.0)
    log = _replace(in_fork=True)
    assert _ask(registry, function, answer) == _OWN
    assert log.warnings == ["a fork could not inspect the model's class: vLLM starts a process"]
    assert multiprocessing.active_children() == []
    assert "Traceback" not in capfd.readouterr().err  # gRPC may say there that a process with its threads forks


def test_a_machine_that_starts_no_processes_is_no_reason_to_fail(
    registry: ModuleType, answer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be forked is left to vLLM."""
    monkeypatch.setattr(os, "fork", lambda: (_ for _ in ()).throw(BlockingIOError("too many processes")))
    _replace(in_fork=True)
    assert _ask(registry, os.getpid, answer) == _OWN


def test_a_fork_of_this_process_asks_a_process_of_vllms(registry: ModuleType, answer: Path) -> None:
    """EngineCore may be a fork, and may have initialized CUDA."""
    _replace(in_fork=True)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, _ask(registry, os.getpid, answer))
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as said:
        assert said.read() == _OWN
    os.waitpid(child, 0)


@pytest.mark.parametrize(("method", "is_initialized"), [("spawn", False), ("fork", True)])
def test_where_vllm_would_not_fork_nothing_is_forked(
    registry: ModuleType, answer: Path, monkeypatch: pytest.MonkeyPatch, method: str, *, is_initialized: bool
) -> None:
    """The operator has chosen so, or a fork could not use CUDA."""
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", method)
    cuda = SimpleNamespace(is_initialized=lambda: is_initialized)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    log = _replace(in_fork=True)
    assert _ask(registry, os.getpid, answer) == _OWN
    assert log.warnings == []
