"""Check a finished set before it is published. ``gen_vllm_env.sh verify`` does the same for any repository.

Cheap checks come first. The plan is checked before anything slow starts. Then follow the files' digests, the packed files
(opened as a server does) and each unpacked tree. Last, its interpreter is started as Triton's launcher starts the stub, and
imports the modules that vLLM imports later.
"""

from pathlib import Path

from vllm_env.base import report
from vllm_env.base.cache import key_of
from vllm_env.base.workspace import Workspace
from vllm_env.layout.layout import Layout, Packed
from vllm_env.lock.pylock import Lock
from vllm_env.prefix.needed_libraries import check_missing_libraries, find_needed_libraries
from vllm_env.triton.root import NEWEST_KNOWN, TritonRoot, is_known, rules_of

from . import launcher_check, leaked_paths, tree_rules
from .compiler_check import check_compiler
from .lazy_imports import check_lazy_imports
from .tree_rules import Expected

_FORMAT = 3  # raise it when a check below becomes stricter


def check_plan(lock: Lock, triton: TritonRoot) -> tuple[str, ...]:
    """Raise an error, before anything slow starts, if the stub of this Triton would fail at the first request of a lock.

    Returns:
        Notes for the user, such as that the release is newer than the table of rules.

    Raises:
        VllmEnvError: names the rule and the remedy.
    """
    tree_rules.check_versions(lock.versions(), triton.release)
    if is_known(triton.release):
        return ()
    row = f"the rules of {triton.rules.since}, the nearest known ones, are applied"
    return (
        f"Triton {triton.release} is not in the table of releases, which ends with {NEWEST_KNOWN}: {row}",
    )


def verify_packed(
    workspace: Workspace,
    layout: Layout,
    packed: Packed,
    expected: Expected,
    triton: TritonRoot | None = None,
) -> tuple[str, ...]:
    """Open an environment as a server does, below the cache, and check every tree, up to an import of vLLM.

    Returns:
        Notes for the user: findings that are not wrong, but cost time at each start.

    Raises:
        VllmEnvError: names the rule and the remedy.
    """
    notes: list[str] = []
    with workspace.cache.staging() as scratch:
        for tree in layout.open(workspace, packed, triton.path if triton else None, scratch):
            if tree.complete:
                notes += verify_tree(workspace, tree.path, expected)
            else:
                _verify_interpreter(workspace, tree.path, expected)
    return tuple(notes)


def _verify_interpreter(workspace: Workspace, environment: Path, expected: Expected) -> None:
    """Check the interpreter in which a stub starts before the other packages are unpacked."""
    leaked_paths.check_leaks(environment, leaked_paths.build_places(workspace.cache.root))
    activates = rules_of(expected.release).activates
    started = launcher_check.start(workspace, environment, ("numpy",), activates=activates)
    launcher_check.judge(started, environment, Expected(expected.python, expected.release, {}))


def verify_tree(workspace: Workspace, environment: Path, expected: Expected) -> tuple[str, ...]:
    """Check an unpacked environment, up to an import of vLLM; return notes as ``verify_packed`` does.

    Raises:
        VllmEnvError: names the rule and the remedy.
    """
    report.step("rules of the loader")
    tree_rules.check_tree(environment, expected)
    report.step("shared libraries")
    check_missing_libraries(find_needed_libraries(environment, expected.profile))
    report.step("its own compiler")
    check_compiler(workspace, environment)
    report.step("paths of the build")
    leaked_paths.check_leaks(environment, leaked_paths.build_places(workspace.cache.root))
    report.step("imports without activation")
    started = launcher_check.check_start(workspace, environment, expected)
    report.step("what vLLM imports later")
    notes = check_lazy_imports(workspace, environment, expected)
    if started.stale:
        named = ", ".join(started.stale[:3])
        bytecode = f"{len(started.stale)} of {len(started.files)} modules have no bytecode that fits ({named}, …)"
        return (f"{bytecode}: slower starts", *notes)
    return notes


def verified_mark(
    workspace: Workspace, environment: str, stub_sha256: str, expected: Expected
) -> Path:
    """Return the file that records a passed check of an environment (digest or key) on this machine with a stub and versions.

    The file exists only if the environment has passed.
    """
    key = key_of(
        _FORMAT, environment, stub_sha256, expected.release, expected.python, expected.versions
    )
    return workspace.cache.path("verified", key)
