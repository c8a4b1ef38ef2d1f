"""The prefix: a conda environment with the lock's interpreter and wheels, ready to be packed.

In the order of the steps: conda packages, wheels, what makes it work without activation, what is left out, what makes
it independent of this build, bytecode.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from vllm_env import inside
from vllm_env.base import report
from vllm_env.base.cache import key_of, touch
from vllm_env.base.filesystem import put_in_place, require_space
from vllm_env.base.machine import NEUTRAL_PREFIX
from vllm_env.base.process import run
from vllm_env.base.workspace import Workspace
from vllm_env.interpreter.layer import install_layer
from vllm_env.lock.pylock import Lock

from .file_owners import check_clashes, find_clashes, read_installed
from .machine_libraries import add_libraries, newer_glibc, with_dependencies
from .needed_libraries import check_missing_libraries, find_needed_libraries
from .prune import prune, rules_for
from .relocate import install_runtime, make_relocatable, set_times, site_packages

# Raise it when what a prefix holds changes: by a step below, or by what relocate.py copies into it.
# No digests of the sources: a new comment there would have every user build 2 to 8 GB again.
_FORMAT = 2
BUILD_SPACE = {"cpu": 6 * 10**9, "cuda": 12 * 10**9}
"""Bytes that making a prefix of each profile takes; unpacked they are about 3.3 and 8.2 GB."""
EXTRACTED_SPACE = {"cpu": 25 * 10**8, "cuda": 10**10}
"""Bytes that Triton's extraction of an environment of each profile takes in /tmp."""


@dataclass(frozen=True)
class Prefix:
    """A finished conda prefix; ``key`` is its content key, ``reused`` tells that it was there already.

    ``left_out`` has the names of the rules by which files were omitted.
    """

    path: Path
    key: str
    lock: Lock
    left_out: tuple[str, ...]
    reused: bool

    @property
    def python(self) -> Path:
        """The environment's interpreter."""
        return self.path / "bin" / "python"


def prefix_key(lock: Lock, keep: tuple[str, ...]) -> str:
    """Return the content key of a lock's prefix: what is installed, and which rules leave out what."""
    rules = [rule.name for rule in rules_for(lock.spec.profile, keep)]
    return key_of(_FORMAT, lock.digest, lock.spec.profile, rules)


def has_prefix(workspace: Workspace, lock: Lock, keep: tuple[str, ...]) -> bool:
    """Tell whether the cache has a lock's prefix."""
    return workspace.cache.path("prefixes", prefix_key(lock, keep), ".complete").is_file()


def make_prefix(workspace: Workspace, lock: Lock, keep: tuple[str, ...] = (), triton: Path | None = None) -> Prefix:
    """Return the prefix of a lock from the cache, or make it; ``keep`` names the rules that leave nothing out.

    Libraries that no wheel brings are taken from the Triton root ``triton`` where it has its own, else from this machine.
    A VllmEnvError tells of too little space, and of a wheel that is not found or is not the lock's.
    """
    key = prefix_key(lock, keep)
    target = workspace.cache.path("prefixes", key)
    rules = rules_for(lock.spec.profile, keep)
    left_out = tuple(rule.name for rule in rules)
    if (target / ".complete").is_file():
        touch(target)
        return Prefix(target / "env", key, lock, left_out, reused=True)
    require_space(workspace.cache.root, BUILD_SPACE[lock.spec.profile], "the environment")
    with workspace.cache.staging() as staging:
        made = staging / "made"
        prefix = made / "env"
        report.step(f"Python {lock.python}", 0.02)
        install_layer(workspace, lock.conda, prefix)
        _install_wheels(workspace, lock, prefix, staging)
        owned = read_installed(site_packages(prefix))  # before anything rewrites what the wheels say of themselves
        check_clashes(find_clashes(owned), owned)
        install_runtime(prefix, lock.digest)
        prune(prefix, rules)
        _complete_libraries(prefix, lock.spec.profile, triton / "lib" if triton else None)
        make_relocatable(prefix, site_packages(prefix))
        set_times(prefix)
        _compile(prefix)
        set_times(prefix)
        (made / ".complete").touch()
        put_in_place(made, target)
    return Prefix(target / "env", key, lock, left_out, reused=False)


def _install_wheels(workspace: Workspace, lock: Lock, prefix: Path, staging: Path) -> None:
    requirements = staging / "requirements.txt"
    requirements.write_text(lock.requirements, "utf-8")
    report.step(f"{len(lock.wheels)} wheels", 0.05)
    command = [
        "pip", "install", "--python", prefix / "bin" / "python", "--no-deps",
        "--require-hashes", "--no-compile-bytecode", "--only-binary", ":all:", "--no-config",
        # links into uv's cache: nothing here is written in place, and 3 GB need not be copied
        "--link-mode", "hardlink", "--requirement", requirements,
    ]  # fmt: skip
    workspace.network.uv(
        command,
        "install the wheels of the lock",
        torch_backend=lock.spec.torch_backend,
        # TMPDIR: uv leaves a lock file there for each environment that it has seen
        env={"VIRTUAL_ENV": "", "CONDA_PREFIX": "", "TMPDIR": str(staging)},
        remedy="Check that the package registry answers; --upgrade if a locked wheel was withdrawn.",
    )


def _complete_libraries(prefix: Path, profile: str, vendored: Path | None) -> None:
    """Pack what files of the environment need, no wheel brings and a bare container lacks, such as vLLM's libnuma.so.1."""
    found = find_needed_libraries(prefix, profile)
    added = add_libraries(with_dependencies(found.missing_libraries, prefix, vendored), prefix, found.missing)
    for library in added:
        report.note(f"packed {library.source}, which the environment needs and a bare container lacks")
    check_missing_libraries(find_needed_libraries(prefix, profile) if added else found)  # before it is kept for later builds
    for library in newer_glibc(added, found):
        needed = ".".join(map(str, library.glibc))
        report.note(f"{library.soname} of this machine makes the environment need glibc {needed}")


def _compile(prefix: Path) -> None:
    script = inside.FOLDER / "compile_tree.py"
    run(
        [prefix / "bin" / "python", "-I", "-S", script, prefix, NEUTRAL_PREFIX, str(os.cpu_count() or 1)],
        what="compile the environment to bytecode",
        # a fixed hash seed: the order of sets in constants would differ from build to build
        env={"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": ""},
        on_line=_show_compiled,
    )


def _show_compiled(line: str) -> None:
    numbers = line.split()
    if len(numbers) == 2 and numbers[0].isdigit():
        report.step(f"bytecode {numbers[0]}/{numbers[1]}", 0.4 + 0.6 * int(numbers[0]) / max(1, int(numbers[1])))
