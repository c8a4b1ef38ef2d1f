"""What a first start does ahead of vLLM, with the real vLLM."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import pytest

from support.repositories import CHECKOUT

if TYPE_CHECKING:
    from pathlib import Path

    from support.serving import Parts

pytestmark = pytest.mark.e2e

# In an interpreter of the environment: vLLM's registry looks at a class with any process of its own forbidden, then here.
_LOOK = """
import dataclasses, importlib, json, os, subprocess, sys
sys.path.insert(0, sys.argv[1])
from triton_vllm import inspector
ahead = inspector.start(os.environ)
registry = importlib.import_module(inspector.REGISTRY)
ahead.lend(registry)
real = subprocess.run

def run(command, *others, **options):
    assert command != registry._SUBPROCESS_COMMAND, "one more process"
    return real(command, *others, **options)

subprocess.run = run
model = registry.ModelRegistry.models["OPTForCausalLM"]
found = model.inspect_model_cls()
subprocess.run = real
alone = registry._ModelInfo.from_model_cls(model.load_model_cls())
print(json.dumps([dataclasses.asdict(found), dataclasses.asdict(alone), inspector.start(os.environ) is None]))
"""


def test_vllms_own_look_at_a_model_uses_the_process_started_ahead(parts: Parts, tmp_path: Path) -> None:
    """vLLM gets its answer with no other process, the right one, and keeps it; the next start needs no process ahead."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    done = subprocess.run(
        [parts.environment / "bin/python", "-c", _LOOK, str(CHECKOUT / "model_repository/vllm/1")],
        env=environment, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found, alone, kept = json.loads(done.stdout.splitlines()[-1])
    assert found == alone
    assert found["architecture"] == "OPTForCausalLM"
    assert kept
