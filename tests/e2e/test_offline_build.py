"""A machine without network: a fresh clone, an empty home and a wheelhouse are enough, from the bootstrap to the answers."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from support.namespaces import without_network
from support.repositories import BUILD_SECONDS, CHECKOUT

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_a_wheelhouse_is_all_that_a_fresh_clone_needs(session_folder: Path) -> None:
    """Filled by one clone; then another one, which has no tools, Triton, cache or pip configuration, builds and is asked."""
    folder = session_folder / "offline"
    isolated = without_network()
    for name in ("filler", "fresh"):
        subprocess.run(["git", "clone", "--quiet", CHECKOUT, folder / name], check=True)
    (folder / "home").mkdir()
    fill: list[str | Path] = [folder / "filler/gen_vllm_env.sh", "wheelhouse", folder / "house", "--profile", "cpu", "--locked"]
    subprocess.run(fill, env={**os.environ, "VLLM_ENV_CACHE": str(folder / "cache")}, check=True, timeout=BUILD_SECONDS)
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder / "home"), "PIP_CONFIG_FILE": os.devnull}
    options: list[str | Path] = ["--profile", "cpu", "--offline", "--wheelhouse", folder / "house", "--locked"]
    build = [*isolated, folder / "fresh/gen_vllm_env.sh", *options]
    done = subprocess.run(build, env=environment, capture_output=True, text=True, check=False, timeout=BUILD_SECONDS)
    assert done.returncode == 0, done.stderr
    assert "PASS: vLLM example" in done.stdout
