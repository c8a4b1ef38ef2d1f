"""Make the prefix: a conda environment with the lock's interpreter and wheels, ready to be packed.

The steps, in this order: conda packages, wheels, the hook that replaces activation, omitted files, missing libraries,
removal of this build's paths and times, bytecode.
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

# Raise it when the content of a prefix changes: through a step below, or through a file that relocate.py copies into it.
# The key has no digests of the sources: a new comment there would make every user build 2 to 8 GB again.
_FORMAT = 2
BUILD_SPACE = {"cpu": 6 * 10**9, "cuda": 12 * 10**9}
"""Free bytes needed to make a prefix, by profile. An unpacked prefix has about 3.3 GB (cpu) or 8.2 GB (cuda)."""
EXTRACTED_SPACE = {"cpu": 25 * 10**8, "cuda": 10**10}
"""Bytes in /tmp that Triton needs to extract an environment, by profile."""


@dataclass(frozen=True)
class Prefix:
    """A finished conda prefix.

    Attributes:
        path: the prefix.
        key: its content key.
        lock: the lock that it was made from.
        left_out: names of the rules by which files were omitted.
        reused: whether the cache already had it.
    """

    path: Path
    key: str
    lock: Lock
    left_out: tuple[str, ...]
    reused: bool

    @property
    def python(self) -> Path:
        """Return the environment's interpreter."""
        return self.path / "bin" / "python"


def prefix_key(lock: Lock, keep: tuple[str, ...]) -> str:
    """Return the content key of a lock's prefix, made from the lock and the rules that omit files."""
    rules = [rule.name for rule in rules_for(lock.spec.profile, keep)]
    return key_of(_FORMAT, lock.digest, lock.spec.profile, rules)


def has_prefix(workspace: Workspace, lock: Lock, keep: tuple[str, ...]) -> bool:
    """Return whether the cache has a lock's prefix."""
    return workspace.cache.path("prefixes", prefix_key(lock, keep), ".complete").is_file()


def make_prefix(
    workspace: Workspace, lock: Lock, keep: tuple[str, ...] = (), triton: Path | None = None
) -> Prefix:
    """Return the prefix of a lock from the cache, or make it.

    Args:
        workspace: the cache and the network.
        lock: the packages to install.
        keep: names of the rules that must not omit files.
        triton: a Triton root. Libraries that no wheel contains are taken from it if it has its own, else from this machine.

    Raises:
        VllmEnvError: too little space is free, or a wheel is not found or does not match the lock.
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
        owned = read_installed(
            site_packages(prefix)
        )  # before the wheels' RECORD files are rewritten
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
        # Hard links into uv's cache save copying 3 GB. They are safe because no step writes a file in place.
        "--link-mode", "hardlink", "--requirement", requirements,
    ]  # fmt: skip
    workspace.network.uv(
        command,
        "install the wheels of the lock",
        torch_backend=lock.spec.torch_backend,
        # TMPDIR: uv leaves a lock file there for each environment that it has seen.
        env={"VIRTUAL_ENV": "", "CONDA_PREFIX": "", "TMPDIR": str(staging)},
        remedy="Check that the package registry answers; --upgrade if a locked wheel was withdrawn.",
    )


def _complete_libraries(prefix: Path, profile: str, vendored: Path | None) -> None:
    """Pack libraries that the environment needs, but no wheel contains and a bare container lacks: vLLM's libnuma.so.1."""
    found = find_needed_libraries(prefix, profile)
    added = add_libraries(
        with_dependencies(found.missing_libraries, prefix, vendored), prefix, found.missing
    )
    for library in added:
        report.note(
            f"packed {library.source}, which the environment needs and a bare container lacks"
        )
    # Before the prefix is cached for later builds.
    check_missing_libraries(find_needed_libraries(prefix, profile) if added else found)
    for library in newer_glibc(added, found):
        needed = ".".join(map(str, library.glibc))
        report.note(f"{library.soname} of this machine makes the environment need glibc {needed}")


def _compile(prefix: Path) -> None:
    script = inside.FOLDER / "compile_tree.py"
    run(
        [
            prefix / "bin" / "python",
            "-I",
            "-S",
            script,
            prefix,
            NEUTRAL_PREFIX,
            str(os.cpu_count() or 1),
        ],
        what="compile the environment to bytecode",
        # A fixed hash seed: otherwise the order of sets in constants would differ from build to build.
        env={"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": ""},
        on_line=_show_compiled,
    )


def _show_compiled(line: str) -> None:
    numbers = line.split()
    if len(numbers) == 2 and numbers[0].isdigit():
        report.step(
            f"bytecode {numbers[0]}/{numbers[1]}",
            0.4 + 0.6 * int(numbers[0]) / max(1, int(numbers[1])),
        )
