"""What needs a CUDA toolkit is off where there is none, before vLLM is imported; what cannot work is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.fake_log import FakeLog
from triton_vllm.base.errors import ConfigError
from triton_vllm.startup.toolkit import SWITCHES, has_toolkit, refuse, switch_off

SAMPLER, DEEP_GEMM, ALL_REDUCE = NAMES = tuple(switch.variable for switch in SWITCHES)
TRITON = "TRITON_CACHE_DIR"
ROOT = Path(__file__).parents[4]


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """An environment with vLLM, which nobody may import, its copy of DeepGEMM, and FlashInfer."""
    site = tmp_path / "site"
    for name in ("vllm/third_party/deep_gemm", "flashinfer"):
        (site / name).mkdir(parents=True)
    (site / "vllm" / "__init__.py").write_text("raise SystemExit('vLLM was imported')\n")
    (site / "vllm" / "envs.py").write_text("".join(f'{{"{name}": 1}}\n' for name in NAMES))
    (site / "flashinfer" / "__init__.py").write_text("raise SystemExit('FlashInfer was imported')\n")
    monkeypatch.syspath_prepend(site)
    return site


@pytest.fixture
def host(tmp_path):
    """Return a function that makes a host with programs, and returns a process's variables there."""

    def make(*programs, **variables):
        for name in programs:
            file = tmp_path / "host" / "bin" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("#!/bin/sh\n")
            file.chmod(0o755)
        # An empty home of CUDA: this machine may have one at the usual place.
        return {"PATH": str(tmp_path / "host" / "bin"), "CUDA_HOME": str(tmp_path / "host"), **variables}

    return make


def test_without_a_toolkit_all_are_off_and_the_log_says_so_once(packages, host):
    """With what takes their place, and how to turn them on."""
    variables, log = host(), FakeLog()
    switch_off(variables, log)
    assert {name: variables[name] for name in NAMES} == dict.fromkeys(NAMES, "0")
    (line,) = log.lines
    assert [switch.variable for switch in SWITCHES if f"{switch.variable}=0: {switch.cost}" not in line] == []
    assert "needs a CUDA toolkit" in line
    assert line in " ".join((ROOT / "docs/first_start.md").read_text("utf-8").split())


@pytest.mark.parametrize("name", NAMES)
def test_the_operators_own_value_stays(name, packages, host):
    """Also an empty one; the other switches are set."""
    for value in ("1", ""):
        variables = host(**{name: value})
        switch_off(variables, FakeLog())
        assert variables[name] == value
        assert [variables[other] for other in NAMES if other != name] == ["0", "0"]


@pytest.mark.parametrize("switch", SWITCHES, ids=NAMES)
def test_a_toolkit_leaves_vllm_alone(switch, packages, host):
    """But FlashInfer's sampler stays off, as it was: compiling it takes minutes."""
    variables, log = host("nvcc", "g++"), FakeLog()
    switch_off(variables, log)
    assert variables.get(switch.variable) == ("0" if switch.variable == SAMPLER else None)
    (line,) = log.lines
    assert "takes minutes" in line
    assert DEEP_GEMM not in line


@pytest.mark.parametrize("programs", [("nvcc",), ("g++",)])
def test_half_a_toolkit_compiles_nothing(programs, packages, host):
    """nvcc calls the host's C++ compiler."""
    variables = host(*programs)
    switch_off(variables, FakeLog())
    assert (variables[DEEP_GEMM], variables[ALL_REDUCE]) == ("0", "0")


def test_nvcc_is_looked_for_where_flashinfer_looks(host, tmp_path):
    """CUDA_HOME, then CUDA_PATH, then PATH; a wrong one hides the others."""
    found = host("nvcc", "g++")
    assert has_toolkit(found)
    assert has_toolkit({**found, "CUDA_HOME": "", "CUDA_PATH": found["CUDA_HOME"]})
    assert has_toolkit({**found, "CUDA_HOME": ""})
    assert not has_toolkit({**found, "CUDA_HOME": str(tmp_path)})
    (tmp_path / "host/bin/g++").unlink()
    assert has_toolkit({**found, "CXX": "/opt/c++"})


def test_an_environment_without_the_libraries_is_left_alone(packages, host):
    """vLLM's CPU build has none of them."""
    (packages / "flashinfer").rename(packages / "other")
    (packages / "vllm/third_party/deep_gemm").rmdir()
    log = FakeLog()
    variables = host()
    switch_off(variables, log)
    refuse({"attention_backend": "FLASHINFER"}, variables, "args.json")
    assert (variables, log.lines) == (host(), [])


def test_a_variable_that_this_vllm_does_not_know_is_not_set(packages, host):
    """vLLM would warn of it."""
    (packages / "vllm" / "envs.py").write_text(f'{{"{SAMPLER}": 1, "{DEEP_GEMM}_E8M0": 1}}\n')
    variables = host()
    switch_off(variables, FakeLog())
    assert [name for name in NAMES if name in variables] == [SAMPLER]


SHAPES: dict[str, dict[str, object]] = {
    "attention_backend": {"attention_backend": "FLASHINFER"},
    "attention_backend: vllm.v1": {"attention_backend": "vllm.v1.attention.backends.flashinfer.FlashInferBackend"},
    "attention_config: backend": {"attention_config": {"backend": "flashinfer"}},
    "attention_config: mla_prefill_backend": {"attention_config": {"mla_prefill_backend": "FLASHINFER"}},
    "attention_config: backend_per_kind: mla_attention": {
        "attention_config": json.dumps({"backend_per_kind": {"mla_attention": "FLASHINFER_MLA"}})
    },
    "speculative_config: attention_backend": {"speculative_config": {"attention_backend": "FLASHINFER"}},
}


@pytest.mark.parametrize("named", SHAPES)
def test_a_chosen_backend_that_cannot_be_compiled_is_refused(named, packages, host):
    """The message has the file, the argument, the reason and what to change; with a toolkit, or compiled kernels, it is taken."""
    arguments = {"model": "m", **SHAPES[named]}
    with pytest.raises(ConfigError, match=r"^args\.json: " + named) as caught:
        refuse(arguments, host(), "args.json")
    assert "leave it out" in str(caught.value)
    refuse(arguments, host("nvcc", "g++"), "args.json")
    (packages / "flashinfer_jit_cache").mkdir()
    refuse(arguments, host(CUDA_HOME="/none"), "args.json")


LOAD = """
import json, sys
from support import fake_triton
fake_triton.install()
from support.fake_log import FakeLog
from triton_vllm.startup.prepare import prepare
from triton_vllm.startup.progress import Progress
log = FakeLog()
args = {"model_repository": sys.argv[1], "model_version": "1", "model_name": "vllm", "model_config": sys.argv[2],
        "model_instance_kind": "KIND_MODEL", "model_instance_device_id": "0"}
prepare(args, log, Progress(log))
"""


@pytest.mark.long
@pytest.mark.parametrize("own", [{}, dict.fromkeys((*NAMES, TRITON), "1")], ids=["none", "the operator's"])
def test_vllm_sees_the_variables_when_it_is_imported(own, packages, host, tmp_path):
    """The whole preparation of a load, up to the import."""
    (packages / "vllm" / "__init__.py").write_text(
        f"import os\nraise SystemExit(' '.join(os.environ.get(name, '-') for name in {(*NAMES, TRITON)!r}))\n"
    )
    (tmp_path / "model" / "1").mkdir(parents=True)
    (tmp_path / "model" / "vllm_engine_args.json").write_text('{"model": "m"}')
    path = os.pathsep.join(map(str, (packages, ROOT / "model_repository/vllm/1", ROOT / "tests")))
    variables = host(PYTHONPATH=path, HOME=str(tmp_path), TMPDIR=str(tmp_path), **own)
    config = json.dumps({"model_transaction_policy": {"decoupled": True}})
    command = [sys.executable, "-c", LOAD, str(tmp_path / "model"), config]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    expected = {**dict.fromkeys(NAMES, "0"), TRITON: f"{tmp_path}/.cache/vllm/triton", **own}
    assert done.stderr.splitlines()[-1:] == [" ".join(expected.values())]
