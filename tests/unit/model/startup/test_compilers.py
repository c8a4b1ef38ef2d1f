"""How vLLM compiles on machines with and without compilers: what is set, what stays, what the log is told."""

from __future__ import annotations

import pytest

from triton_vllm.startup.compilers import OWN_COMPILER, Compilers, choose


@pytest.fixture
def prefix(tmp_path):
    """An environment with a compiler of its own."""
    (tmp_path / "env" / "bin").mkdir(parents=True)
    (tmp_path / "env" / "bin" / OWN_COMPILER).touch()
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
    assert chosen.variables == {"CC": str(prefix / "bin" / OWN_COMPILER)}
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
