"""The vLLM without an engine has what `triton_vllm.vllm_api` looks for, and brings no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import engineless

ROOT = Path(__file__).parents[3]
LOADED = """
import json, sys
from triton_vllm import vllm_api
vllm = vllm_api.load()
print(json.dumps({
    "path": vllm.path,
    "lacking": vllm_api.lacking(vllm),
    "arguments": sorted(vllm_api.engine_arg_types(vllm)),
    "heavy": sorted({"torch", "transformers", "tokenizers"} & sys.modules.keys()),
}))
"""


@pytest.fixture
def site(tmp_path):
    """A folder for packages with nothing but the lane's vLLM."""
    (tmp_path / "prometheus_client.py").write_text("class Counter:\n    def __init__(self, *_): pass\n\nGauge = Counter\n")
    engineless.write_package(tmp_path)
    return tmp_path


def test_it_has_what_the_adapter_needs(site):
    """Also for several instances; it is a package on disk, as the real one is."""
    path = os.pathsep.join(map(str, (site, ROOT / "model_repository" / "vllm" / "1")))
    done = subprocess.run(
        [sys.executable, "-c", LOADED], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["path"] == str(site / "vllm")
    assert seen["lacking"] == ""
    assert {"model", "disable_log_stats", *engineless.TAKEN} <= {*seen["arguments"]}
    assert seen["heavy"] == []


def test_an_environment_has_nothing_of_the_real_vllm(tmp_path):
    """Its interpreter lies in it and not behind a link, by which Python would find the real packages."""
    real = tmp_path / "real"
    packages = real / "lib" / "python3.11" / "site-packages"
    for name in ("vllm", "torch", "numpy", "prometheus_client"):
        (packages / name).mkdir(parents=True)
        (packages / name / "__init__.py").touch()
    (real / "lib" / "python3.11" / "os.py").touch()
    (real / "lib" / "libpython3.11.so.1.0").touch()
    (real / "bin").mkdir()
    (real / "bin" / "python3.11").touch()
    (real / "bin" / "python").symlink_to("python3.11")
    made = engineless.make_environment(real, tmp_path / "made")
    site = made / "lib" / "python3.11" / "site-packages"
    assert sorted(path.name for path in site.iterdir()) == ["numpy", "prometheus_client", "vllm"]
    assert (site / "vllm" / "_engine.py").is_file()
    assert not (site / "vllm").is_symlink()
    assert (made / "lib" / "libpython3.11.so.1.0").resolve() == real / "lib" / "libpython3.11.so.1.0"
    assert (made / "bin" / "python").resolve() == made / "bin" / "python3.11"
