"""A build in a network namespace without interfaces, from a wheelhouse."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

from support import small_build
from support.namespaces import without_network
from vllm_env.sketch import PROVISIONED, installed_triton

if TYPE_CHECKING:
    from pathlib import Path


def test_a_wheelhouse_is_enough(small_spec: Path, small_cache: Path, tmp_path: Path) -> None:
    """Filled with network; then, with empty caches and no network, the same environment is built from it alone."""
    house = tmp_path / "wheelhouse"
    fill: list[str | Path] = [sys.executable, "-m", "vllm_env", "wheelhouse", house, "--profile", "cpu", "--json"]
    fill += ["--spec", small_spec]
    filled = subprocess.run(
        fill, env=small_build.environment(small_cache), capture_output=True, text=True, check=False, timeout=300
    )
    assert filled.returncode == 0, filled.stderr
    wheels = [file for file in house.glob("*.whl") if not file.name.startswith("nvidia_pytriton-")]
    assert json.loads(filled.stdout)["wheels"] == len(wheels) == 3
    assert (installed_triton() == PROVISIONED) is any(house.glob("nvidia_pytriton-*.whl"))
    assert len(list(house.glob("conda/linux-64/python-3.11*.conda"))) == 1
    assert len(list(house.glob("tools/*.whl"))) > 20

    command = small_build.command(tmp_path / "models", "--spec", small_spec, "--offline", "--wheelhouse", house)
    environment = small_build.environment(tmp_path / "empty", UV_CACHE_DIR=str(tmp_path / "uv"))
    proof = "import socket; socket.create_connection(('192.0.2.1', 443), 2)"
    assert (
        "unreachable"
        in subprocess.run([*without_network(), sys.executable, "-c", proof], capture_output=True, text=True, check=False).stderr
    )
    done = subprocess.run(
        [*without_network(), *command, "--locked"], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "empty/conda/channel").exists()  # the interpreter, too, came from the wheelhouse
    manifest = json.loads((tmp_path / "models/vllm/vllm_env.json").read_text())
    assert manifest["vllm"]["version"] == small_build.VERSION


def test_a_wheel_that_is_missing_is_named(small_spec: Path, small_cache: Path, tmp_path: Path) -> None:
    """An incomplete wheelhouse: the message has the package's name, nothing is published."""
    (tmp_path / "wheelhouse").mkdir()
    command = small_build.command(tmp_path / "models", "--spec", small_spec, "--offline", "--wheelhouse", tmp_path / "wheelhouse")
    environment = small_build.environment(small_cache, UV_CACHE_DIR=str(tmp_path / "uv"))
    done = subprocess.run(
        [*without_network(), *command], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 1
    assert "setuptools" in done.stderr or "numpy" in done.stderr
    assert not (tmp_path / "models").exists()
