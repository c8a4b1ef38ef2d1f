"""The prefix: a conda environment with the lock's interpreter and wheels, ready to be packed.

In the order of the steps: conda packages, wheels, what makes it work without activation, what is left out, what makes
it independent of this build, bytecode.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_env.base import cache
from vllm_env.base.errors import VllmEnvError
from vllm_env.base.process import run
from vllm_env.interpreter.layer import install_layer
from vllm_env.interpreter.local import NEUTRAL_PREFIX
from vllm_env.lock.lock import LockOptions, source_arguments

from .prune import RULES, Pruned, prune
from .relocate import make_relocatable, set_times
from .runtime import install_runtime, site_packages

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_env.lock.lock import Lock
    from vllm_env.lock.pip_config import PipConfig

_FORMAT = 1  # raise it when a step below changes what it writes
_SPACE = 12 * 10**9  # bytes; the CUDA environment unpacks to about 9 GB


@dataclass(frozen=True)
class Prefix:
    """A finished conda prefix; ``key`` is its content key, ``reused`` tells that it was there already."""

    path: Path
    key: str
    lock: Lock
    pruned: tuple[Pruned, ...]
    reused: bool

    @property
    def python(self) -> Path:
        """The environment's interpreter."""
        return self.path / "bin" / "python"


def prefix_key(lock: Lock, keep: tuple[str, ...]) -> str:
    """Return the content key of a lock's prefix: what is installed, and how this version of the tool treats it."""
    modules = ("runtime_hook", "runtime", "prune", "strip", "relocate", "compile_tree")
    sources = [Path(__file__).with_name(f"{module}.py") for module in modules]
    rules = [r.name for r in RULES if lock.spec.profile in r.profiles and r.name not in keep]
    return cache.key_of(_FORMAT, lock.digest, lock.spec.profile, rules, [cache.file_sha256(s) for s in sources])


def make_prefix(
    lock: Lock,
    root: Path,
    pip: PipConfig,
    options: LockOptions,
    keep: tuple[str, ...] = (),
    progress: Callable[[float, str], None] = lambda _fraction, _step: None,
) -> Prefix:
    """Return the prefix of a lock from the cache, or make it.

    Raises:
        VllmEnvError: there is too little space, a wheel cannot be had or is not the lock's.
    """
    key = prefix_key(lock, keep)
    target = root / "prefixes" / key
    if (target / ".complete").is_file():
        cache.touch(target)
        return Prefix(target / "env", key, lock, _read_pruned(target), reused=True)
    cache.require_space(root, _SPACE if lock.spec.profile == "cuda" else _SPACE // 2, "the environment")
    with cache.staging(root) as staging:
        prefix = staging / "env"
        progress(0.02, f"Python {lock.python}")
        install_layer(lock.conda, prefix, root, options.wheelhouse)
        _install_wheels(lock, prefix, pip, options, staging, progress)
        install_runtime(prefix, lock.digest)
        pruned = prune(prefix, lock.spec.profile, keep)
        make_relocatable(prefix, site_packages(prefix))
        set_times(prefix)
        _compile(prefix, progress)
        set_times(prefix)
        (staging / ".complete").write_text("\n".join(f"{p.rule} {p.files} {p.size}" for p in pruned))
        _move_into_place(staging, target)
    return Prefix(target / "env", key, lock, pruned, reused=False)


def _install_wheels(
    lock: Lock,
    prefix: Path,
    pip: PipConfig,
    options: LockOptions,
    staging: Path,
    progress: Callable[[float, str], None],
) -> None:
    requirements = staging / "requirements.txt"
    requirements.write_text(lock.requirements, "utf-8")
    count = len(lock.versions())
    progress(0.05, f"{count} wheels")
    command = [
        Path(sys.executable).parent / "uv", "pip", "install", "--python", prefix / "bin" / "python", "--no-deps",
        "--require-hashes", "--no-compile-bytecode", "--only-binary", ":all:", "--no-config",
        # links into uv's cache: nothing here is written in place, and 3 GB need not be copied
        "--link-mode", "hardlink", *_backend(lock), *source_arguments(pip, options), "--requirement", requirements,
    ]  # fmt: skip
    run(
        command,
        what="install the wheels of the lock",
        # TMPDIR: uv leaves a lock file there for each environment that it has seen
        env=pip.uv_environment() | {"VIRTUAL_ENV": "", "CONDA_PREFIX": "", "TMPDIR": str(staging)},
        remedy="Check that the package registry answers; --upgrade if a locked wheel was withdrawn.",
    )


def _backend(lock: Lock) -> list[str]:
    """Name the PyTorch project's index only if no configured source had the torch build when it was resolved."""
    needs_index = lock.spec.torch_backend and os.environ.get("VLLM_ENV_TORCH_INDEX") == "1"
    return ["--torch-backend", lock.spec.torch_backend] if needs_index else []


def _compile(prefix: Path, progress: Callable[[float, str], None]) -> None:
    def show(line: str) -> None:
        numbers = line.split()
        if len(numbers) == 2 and numbers[0].isdigit():
            progress(0.4 + 0.6 * int(numbers[0]) / max(1, int(numbers[1])), f"bytecode {numbers[0]}/{numbers[1]}")

    script = Path(__file__).with_name("compile_tree.py")
    run(
        [prefix / "bin" / "python", "-I", "-S", script, prefix, NEUTRAL_PREFIX, str(os.cpu_count() or 1)],
        what="compile the environment to bytecode",
        # a fixed hash seed: the order of sets in constants would differ from build to build
        env={"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": ""},
        on_line=show,
    )


def _move_into_place(staging: Path, target: Path) -> None:
    finished = staging.parent / f"{staging.name}.done"
    target.parent.mkdir(parents=True, exist_ok=True)
    finished.mkdir()
    for name in ("env", ".complete"):
        (staging / name).rename(finished / name)
    try:
        finished.rename(target)
    except OSError as error:
        cache.remove_tree(finished)
        if not (target / ".complete").is_file():
            raise VllmEnvError(
                f"The environment cannot be moved to {target}: {error.strerror}.", remedy="Run gen_vllm_env.sh clean."
            ) from error


def _read_pruned(target: Path) -> tuple[Pruned, ...]:
    rows = (line.split() for line in (target / ".complete").read_text().splitlines())
    return tuple(Pruned(rule, int(files), int(size)) for rule, files, size in rows)
