"""How vLLM compiles on machines with and without compilers: what is set, what stays, what the log is told."""

from __future__ import annotations

import pytest

from triton_vllm.startup.compilers import OWN, choose, warm_up


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


def test_a_bare_gpu_container_gets_the_environments_compiler_and_no_flashinfer_sampler(prefix, tools):
    """Nothing is there: kernels are compiled with our own compiler, the sampler is off, the log says both."""
    chosen = choose({}, tools(), prefix, on_cpu=False)
    assert chosen.variables == {"CC": str(prefix / "bin" / OWN), "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    assert chosen.arguments == {}
    assert len(chosen.notes) == 2


def test_the_compilers_of_a_container_are_used(prefix, tools):
    """Triton finds gcc. FlashInfer would find nvcc, but compiling its sampler takes minutes."""
    chosen = choose({}, tools("gcc", "g++", "nvcc"), prefix, on_cpu=False)
    assert chosen.variables == {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    assert "VLLM_USE_FLASHINFER_SAMPLER=1" in chosen.notes[0]


def test_the_operators_choice_stays(prefix, tools):
    """CC and the sampler's variable, once set, are not changed."""
    given = tools(CC="/opt/cc", VLLM_USE_FLASHINFER_SAMPLER="1")
    assert choose({}, given, prefix, on_cpu=False).variables == {}


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


def test_the_own_compiler_is_used_once_while_vllm_starts(tmp_path, monkeypatch):
    """As Triton's kernel compiler calls it. Its files go away, and a compiler that fails or is missing does no harm."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    compiler = tmp_path / OWN
    compiler.write_text(f'#!/bin/sh\nfor last; do :; done; test -f "$last" && echo "$*" > "{tmp_path}/asked"\nexit 1\n')
    compiler.chmod(0o755)
    for program in (compiler, tmp_path / "missing"):
        warm_up(str(program)).join()
    words = (tmp_path / "asked").read_text().split()
    assert words[:4] == ["-O3", "-shared", "-fPIC", "-o"]
    assert words[4].startswith(str(tmp_path / "tmp"))
    assert not list((tmp_path / "tmp").iterdir())
