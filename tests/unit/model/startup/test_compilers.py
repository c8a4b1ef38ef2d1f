"""How vLLM compiles on machines with and without compilers: what is set, what stays, what the log is told."""

from __future__ import annotations

import pytest

from support.fake_log import FakeLog
from triton_vllm.startup.compilers import OWN_COMPILER, Compilers, choose, drop_missing


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


@pytest.mark.parametrize("value", ["/opt/gcc/bin/gcc", "/opt/gcc/bin/gcc -pipe", ""])
def test_a_variable_that_names_no_program_is_dropped_and_the_log_says_so(tools, value):
    """An image sets CC and leaves the compiler out; Triton's kernel compiler would take the name as it is."""
    environment = tools("gcc", CC=value, CXX="gcc -std=c++17")
    drop_missing(environment, said := FakeLog())
    assert "CC" not in environment
    assert environment["CXX"] == "gcc -std=c++17"
    assert said.warnings == [f"CC={value} is not used: there is no such program"]


def test_a_compiler_that_a_variable_names_by_its_path_is_kept(tools, tmp_path):
    """Nothing is on the PATH of this one."""
    environment = tools("gcc", CC=str(tmp_path / "tools" / "gcc")) | {"PATH": "/nowhere"}
    drop_missing(environment, FakeLog())
    assert "CC" in environment
