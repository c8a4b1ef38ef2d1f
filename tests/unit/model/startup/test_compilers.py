"""How vLLM compiles on machines with and without compilers: what is set, what stays, what the log is told."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from triton_vllm.startup import compilers, prepare
from triton_vllm.startup.compilers import OWN, Compilers, choose, warm_up


@pytest.fixture
def prefix(tmp_path):
    """An environment with a compiler of its own."""
    (tmp_path / "env" / "bin").mkdir(parents=True)
    (tmp_path / "env" / "bin" / OWN).touch()
    return tmp_path / "env"


@pytest.fixture
def tools(tmp_path):
    """Puts programs on a PATH and returns the variables with it."""

    def make(*names, **variables):
        for name in names:
            program = tmp_path / "tools" / name
            program.parent.mkdir(exist_ok=True)
            program.write_text("#!/bin/sh\n")
            program.chmod(0o755)
        return {"PATH": str(tmp_path / "tools"), **variables}

    return make


def test_a_bare_gpu_container_gets_the_environments_compiler(prefix, tools):
    """Nothing is there: kernels are compiled with our own compiler, and the log says so."""
    chosen = choose({}, tools(), prefix, on_cpu=False)
    assert chosen.variables == {"CC": str(prefix / "bin" / OWN)}
    assert chosen.arguments == {}
    assert len(chosen.notes) == 1


def test_the_compilers_of_a_container_are_used(prefix, tools):
    """Triton finds gcc. Nor is CC changed once it is set."""
    assert choose({}, tools("gcc"), prefix, on_cpu=False) == Compilers()
    assert choose({}, tools(CC="/opt/cc"), prefix, on_cpu=False) == Compilers()


def test_without_any_compiler_the_log_names_the_remedy(tmp_path, tools):
    """An environment that was built without ziglang."""
    chosen = choose({}, tools(), tmp_path, on_cpu=False)
    assert "CC" not in chosen.variables
    assert "--with ziglang" in chosen.notes[0]


def test_a_cpu_without_a_cpp_compiler_or_headers_runs_eagerly(prefix, tools, monkeypatch):
    """torch.compile would fail at the first start; who chose between eager and compiled keeps that."""
    assert choose({}, tools(), prefix, on_cpu=True).arguments == {"enforce_eager": True}
    assert choose({"enforce_eager": False}, tools(), prefix, on_cpu=True).arguments == {}
    assert choose({"compilation_config": 0}, tools(), prefix, on_cpu=True).arguments == {}
    assert choose({}, tools("g++"), prefix, on_cpu=True).arguments == {}
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(prefix))  # Debian's interpreter without its -dev package
    (chosen,) = choose({}, tools("g++"), prefix, on_cpu=True).notes
    assert "no Python.h here" in chosen


@pytest.fixture
def own(prefix):
    """A compiler of the environment that notes how it was called, and fails."""
    file = prefix / "bin" / OWN
    file.write_text(f'#!/bin/sh\nfor last; do :; done; test -f "$last" && echo "$*" > "{prefix}/asked"\nexit 1\n')
    file.chmod(0o755)
    return file


def test_the_own_compiler_is_used_once_while_vllm_starts(own, prefix, tools, tmp_path, monkeypatch):
    """As Triton's kernel compiler calls it, with its files in the process's own folder."""
    threads = []
    monkeypatch.setattr(compilers, "warm_up", lambda *given: threads.append(warm_up(*given)))
    monkeypatch.setattr("triton_vllm.vllm_api.runs_on_cpu", lambda: False)
    monkeypatch.setattr("os.environ", tools())
    monkeypatch.setattr("sys.prefix", str(prefix))
    log = SimpleNamespace(info=lambda _: None)
    prepare._choose_compilers({}, log, None)
    assert threads == []
    monkeypatch.delitem(os.environ, "CC")
    prepare._choose_compilers({}, log, SimpleNamespace(path=tmp_path))
    threads[0].join()
    assert (prefix / "asked").read_text().split()[:5] == ["-O3", "-shared", "-fPIC", "-o", str(tmp_path / "empty.so")]


def test_a_compiler_that_is_missing_or_hangs_does_no_harm(own, tmp_path, monkeypatch):
    """Triton's kernel compiler says what is wrong."""
    monkeypatch.setattr(compilers, "_MOST_SECONDS", 0.1)
    warm_up(str(tmp_path / "missing"), tmp_path).join()
    own.write_text("#!/bin/sh\nexec sleep 600\n")
    warm_up(str(own), tmp_path).join()
    warm_up(str(own), tmp_path / "gone").join()
