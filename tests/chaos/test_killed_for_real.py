"""The default environment, killed while it is published: what stands in the repository still serves."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from support.patience import LIMIT, pause
from support.repositories import CHECKOUT, triton_options
from vllm_env.model.manifest import read_manifest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_killed_while_it_publishes(built_repository: Path, disk_folder: Path, number: int) -> None:
    """Old set: the built one with another layout asked for. After the signal it is whole, and the next run finishes."""
    repository = disk_folder / "models"
    shutil.copytree(built_repository, repository, copy_function=os.link)
    argv = [
        str(CHECKOUT / "gen_vllm_env.sh"),
        "--no-smoke-run",
        "--layout",
        "directory",
        "--model-repository",
        str(repository),
        *triton_options(),
    ]
    child = subprocess.Popen(argv, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert child.stderr is not None
    for line in child.stderr:
        if line.startswith("publish"):
            break
    pause(1)  # copying 2 GB takes longer
    child.send_signal(number)
    child.communicate(timeout=LIMIT)
    manifest = read_manifest(repository / "vllm")
    assert manifest is not None
    assert (repository / "vllm" / manifest.named.name).exists()
    verified = subprocess.run(
        [argv[0], "verify", "--model-repository", str(repository)], check=False, capture_output=True, text=True
    )
    assert verified.returncode == 0, verified.stderr
    assert subprocess.run(argv, check=False, capture_output=True).returncode == 0
    assert not list(disk_folder.glob(".vllm_env*"))
