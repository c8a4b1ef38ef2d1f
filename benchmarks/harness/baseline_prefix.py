"""The conda prefix that a person would make without this project: the baseline of `cold_start.py`.

The interpreter as conda installs it and the wheels of the repository's lock as `uv pip install` puts them: no bytecode
of theirs, nothing left out, none of the packager's changes. Run by the packager's Python (`.tools/venv`).
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "env"))

from vllm_env.base.cache import cache_root, tree_size
from vllm_env.base.process import run
from vllm_env.interpreter.layer import install_layer
from vllm_env.lock.lock import Lock, LockOptions, make_lock, source_arguments
from vllm_env.lock.pip_config import PipConfig, read_pip_config
from vllm_env.lock.spec import Overrides, load_spec
from vllm_env.publish.manifest import read_manifest
from vllm_env.triton.root import open_root


@dataclass(frozen=True)
class Contents:
    """What a prefix holds; `compiled` counts vLLM's compiled modules, `hooked` tells of the packager's hook."""

    distributions: int
    size: int
    compiled: int
    hooked: bool


def make(prefix: Path, model: Path, triton_root: Path) -> None:
    """Make the prefix with the wheels of a built model's lock; about 15 s and 3 GB for the CPU profile.

    Raises:
        SystemExit: the checkout's lock is no longer the one that the model was built from.
    """
    root, pip = cache_root(), read_pip_config()
    lock = _lock_of(model, triton_root, root, pip)
    try:
        install_layer(lock.conda, prefix, root)
        _install_wheels(lock, prefix, pip)
        _compile_standard_library(prefix)
    except BaseException:
        shutil.rmtree(prefix, ignore_errors=True)  # what is there is taken for whole
        raise


def inspect(prefix: Path) -> Contents:
    """Count what a prefix holds."""
    packages = next(prefix.glob("lib/python3.*/site-packages"))
    return Contents(
        distributions=len(list(packages.glob("*.dist-info"))),
        size=tree_size(prefix),
        compiled=sum(1 for _ in (packages / "vllm").rglob("*.pyc")),
        hooked=(packages / "_vllm_env_runtime.py").exists(),
    )


def _lock_of(model: Path, triton_root: Path, root: Path, pip: PipConfig) -> Lock:
    manifest = read_manifest(model)
    if manifest is None:
        raise SystemExit(f"{model} was not built by gen_vllm_env.sh: it has no manifest")
    spec = load_spec(str(manifest.spec["profile"]), Overrides(), None)
    lock = make_lock(spec, open_root(triton_root).rules, root, pip, LockOptions())
    if lock.digest != manifest.lock_digest:
        raise SystemExit(
            f"{model} was built from another lock than this checkout's: build it again, or --baseline-prefix"
        )
    return lock


def _install_wheels(lock: Lock, prefix: Path, pip: PipConfig) -> None:
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text(lock.requirements, encoding="utf-8")
        uv = Path(sys.executable).parent / "uv"
        fixed = [
            uv,
            "pip",
            "install",
            "--quiet",
            "--no-config",
            "--no-deps",
            "--require-hashes",
            "--only-binary",
            ":all:",
        ]
        sources = source_arguments(pip, LockOptions())
        run(
            [*fixed, "--python", prefix / "bin" / "python", *sources, "--requirement", requirements],
            what="install the wheels of the lock",
            env=pip.uv_environment() | {"UV_COMPILE_BYTECODE": "", "VIRTUAL_ENV": "", "CONDA_PREFIX": ""},
        )


def _compile_standard_library(prefix: Path) -> None:
    """As conda-forge's interpreter has it; that of a local channel comes without."""
    library = next(prefix.glob("lib/python3.*/os.py")).parent
    command = [prefix / "bin" / "python", "-m", "compileall", "-q", "-x", "site-packages", library]
    run(command, what="compile the standard library")
