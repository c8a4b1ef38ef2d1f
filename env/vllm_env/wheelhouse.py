"""Fills a folder with all that a build downloads, for machines without network.

DIR/*.whl              the wheels of the lock, verified against its hashes
DIR/conda/             a conda channel with the packages of the lock
"""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING

from vllm_env.base import cache
from vllm_env.base.process import run
from vllm_env.interpreter import layer as conda
from vllm_env.lock.pip_config import read_pip_config

from .build import make_plan

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_env.base.console import Console
    from vllm_env.lock.lock import Lock
    from vllm_env.lock.pip_config import PipConfig

    from .build import BuildRequest


def fill_wheelhouse(request: BuildRequest, folder: Path, console: Console, *, dry_run: bool = False) -> Lock:
    """Resolve what a build of ``request`` would install, fetch it into ``folder`` unless told not to, and return its lock.

    Nothing is served here, so neither a GPU for --warm nor the smoke run's space is asked for: the machine that fills a
    wheelhouse is seldom the one that serves.

    Raises:
        VllmEnvError: a file cannot be fetched, or is not the lock's.
    """
    root = cache.cache_root()
    fetched_only = dataclasses.replace(request, smoke=False, warm=False)
    with cache.exclusive(root, lambda: console.note("a build is running; waiting for it to end")):
        pip = read_pip_config()
        lock = make_plan(fetched_only, root, pip, console).lock
        if dry_run:
            return lock
        folder.mkdir(parents=True, exist_ok=True)
        with console.stage("wheels") as stage:
            _fetch_wheels(lock, folder, root, pip)
            stage.detail(f"{len(lock.versions())} wheels")
        with console.stage("conda") as stage:
            conda.copy_layer(lock.conda, folder, root)
            stage.detail(f"{len(lock.conda.packages)} packages from {lock.conda.channel}")
    return lock


def _fetch_wheels(lock: Lock, folder: Path, root: Path, pip: PipConfig) -> None:
    with cache.staging(root) as staging:
        requirements = staging / "requirements.txt"
        requirements.write_text(lock.requirements, "utf-8")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        command += ["--only-binary", ":all:", "--python-version", lock.spec.python]
        command += ["--dest", str(folder), "--requirement", str(requirements)]
        remedy = "Check that the package registry answers; --upgrade if a locked wheel was withdrawn."
        environment = pip.uv_environment() | {"TMPDIR": str(staging)}
        run(command, what="download the wheels of the lock", env=environment, remedy=remedy)
