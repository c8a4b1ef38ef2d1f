"""Who inspects the model's class at a first start, with the real vLLM; and the end of its process."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import pytest

from support.kill import kill_at_rest
from support.leftovers import name_of
from support.patience import wait_for
from support.repositories import CHECKOUT
from support.server_processes import stubs
from support.triton_client import get
from vllm_env.serve.processes import is_alive

if TYPE_CHECKING:
    from pathlib import Path

    from support.first_start import FirstStart, Reloaded
    from support.serving import Parts

pytestmark = pytest.mark.e2e

# In an interpreter of the environment: vLLM's registry looks at a class with any process of its own forbidden, then without
# ours. As for a GPU, in a fork, or as for a CPU.
_LOOK = """
import dataclasses, importlib, json, os, subprocess, sys
sys.path.insert(0, sys.argv[1])
from triton_vllm.startup import inspector
inspector.replace_inspection(None, in_fork=sys.argv[2] == "gpu")  # it says nothing
registry = importlib.import_module(inspector.REGISTRY_MODULE)
real = subprocess.run

def run(command, *others, **options):
    assert command != registry._SUBPROCESS_COMMAND, "one more process"
    return real(command, *others, **options)

subprocess.run = run
model = registry.ModelRegistry.models["OPTForCausalLM"]
found = model.inspect_model_cls()
loaded = model.module_name in sys.modules
subprocess.run = real
alone = registry._ModelInfo.from_model_cls(model.load_model_cls())
kept = len(os.listdir(os.environ["VLLM_CACHE_ROOT"] + "/modelinfos"))
print(json.dumps([dataclasses.asdict(found), dataclasses.asdict(alone), loaded, kept]))
"""


@pytest.mark.slow  # they import vLLM
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_vllms_own_look_at_a_model_needs_no_other_process(parts: Parts, tmp_path: Path, device: str) -> None:
    """vLLM gets its answer from a fork or in its own process, the right one, and keeps it for the next start."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    done = subprocess.run(
        [parts.environment / "bin/python", "-c", _LOOK, str(CHECKOUT / "model_repository/vllm/1"), device],
        env=environment, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found, alone, is_loaded, kept = json.loads(done.stdout.splitlines()[-1])
    assert found == alone
    assert found["architecture"] == "OPTForCausalLM"
    assert is_loaded == (device == "cpu")
    assert kept == 1


def test_on_a_cpu_no_process_looks_at_the_model(first_start: FirstStart) -> None:
    """It would import vLLM once more; there is no CUDA to initialize."""
    assert first_start.sightings.stub()
    assert first_start.sightings.inspections() == []


def test_a_compiler_that_is_not_there_is_not_used(first_start: FirstStart) -> None:
    """torch would stop at CXX, though this machine has g++."""
    log = first_start.server.log.read_text("utf-8", "replace")
    assert "CXX=/nowhere/g++ is not used: there is no such program" in log


def test_vllm_does_not_warn_about_our_variables(first_start: FirstStart) -> None:
    """A reader would take its "Unknown vLLM environment variable" for a fault; a test's server has VLLM_ENV_TEST_RUN."""
    log = first_start.server.log.read_text("utf-8", "replace")
    assert "importing vLLM" in log
    assert "Unknown vLLM environment variable" not in log


def test_the_next_start_neither_looks_nor_compiles(reloaded: Reloaded) -> None:
    """Though its folder for temporary files is an empty one, as in a new container."""
    later = reloaded.sightings
    assert later.stub()
    assert later.inspections() == []
    assert not [s.command for s in later.seen.values() if s.command.partition(" ")[0].endswith("cc1plus")]


@pytest.mark.ends_server
def test_killed_stub_takes_its_engine_along(first_start: FirstStart) -> None:
    """vLLM's processes do not outlive the process that owns them, so their memory is free for the next one."""
    server = first_start.server
    parts = [process for process in server.members() if name_of(process).startswith("VLLM::")]
    assert parts
    (stub,) = stubs(server)
    kill_at_rest(stub.pid)
    wait_for(lambda: not any(is_alive(process) for process in parts), "the end of the engine")
    assert get(server.http_url, "/v2/health/live")[0] == 200
