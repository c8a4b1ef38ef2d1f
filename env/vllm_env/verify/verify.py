"""Check a finished set before it is published.

``gen_vllm_env.sh verify`` does the same for any repository. Cheap checks come first. The lock is
checked before anything slow starts. Then follow the packed files, opened as a server does, and
each unpacked tree. Last, its interpreter is started as Triton's launcher starts the stub, and
imports the modules that vLLM imports later.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from vllm_env.base import report
from vllm_env.base.cache import key_of
from vllm_env.base.workspace import Workspace
from vllm_env.layout.layout import Layout, Packed
from vllm_env.lock.pylock import Lock
from vllm_env.prefix.needed_libraries import check_missing_libraries, find_needed_libraries
from vllm_env.triton.root import NEWEST_KNOWN, TritonRoot, is_known

from .compiler_check import check_compiler
from .launcher_check import judge, start
from .lazy_imports import check_imports
from .leaked_paths import build_places, check_leaks
from .together import together
from .tree_rules import Expected, check_tree, check_versions

# Raise it when a check below becomes stricter: then environments that passed before are checked
# again.
_FORMAT = 3


def check_lock(lock: Lock, triton: TritonRoot) -> tuple[str, ...]:
    """Check early that a stub of this Triton would not fail at the first request of a lock.

    Returns:
        Notes for the user, such as that the release is newer than the table of rules.

    Raises:
        VllmEnvError: names the rule and the remedy.
    """
    check_versions(lock.versions(), triton.release)
    if is_known(triton.release):
        return ()
    note = (
        f"Triton {triton.release} is not in the table of releases, "
        f"which ends with {NEWEST_KNOWN}: "
        f"the rules of {triton.rules.since}, the nearest known ones, are applied"
    )
    return (note,)


@contextlib.contextmanager
def opened(
    workspace: Workspace,
    layout: Layout,
    packed: Packed,
    expected: Expected,
    triton: TritonRoot | None,
    *,
    keep: bool = False,
) -> Iterator[Path]:
    """Open an environment as a server does, and yield the whole tree for the block.

    Args:
        workspace: the cache.
        layout: how the environment is packed.
        packed: the environment.
        expected: the expected versions.
        triton: the Triton that will serve it.
        keep: leave the tree where this user's servers look for it, unless the block fails.

    Raises:
        VllmEnvError: Triton would refuse the packed environment, or too little space is free.
    """
    root = triton.path if triton else None
    with (
        workspace.cache.staging() as scratch,
        # Closed early if the block fails: a tree that failed must not stay.
        contextlib.closing(layout.open(packed, root, scratch, keep=keep)) as trees,
    ):
        for tree in trees:
            if tree.complete:
                yield tree.path
            # The small archive of the layout ``parts`` holds only the interpreter.
            else:
                _verify_interpreter(workspace, tree.path, expected)


def _verify_interpreter(workspace: Workspace, environment: Path, expected: Expected) -> None:
    """Check that a stub starts in the small archive of the layout ``parts``.

    The other checks are done in the whole environment. It has the same files, except the
    unpacker's, which hold no paths.

    Raises:
        VllmEnvError: names the rule and the remedy.
    """
    # A stub starts here before the other packages are unpacked. At that point, its interpreter must
    # read UTF-8 and import NumPy.
    started = start(workspace, environment, ("numpy",), activates=expected.activates)
    judge(started, environment, versions={})


def verify_tree(
    workspace: Workspace, environment: Path, expected: Expected, at_once: int | None = None
) -> tuple[str, ...]:
    """Check an unpacked environment, up to an import of vLLM.

    Args:
        workspace: the cache.
        environment: the environment.
        expected: the expected versions.
        at_once: how many checks may run at the same time. None for all.

    Returns:
        Notes for the user: findings that are not wrong, but cost time at each start.

    Raises:
        VllmEnvError: names the rule and the remedy.
    """
    report.step("rules of the loader")
    check_tree(environment, expected)
    report.step("shared libraries, paths of the build, imports")
    # Each takes a core for some seconds.
    results = together(
        partial(_check_files, workspace, environment, expected),
        partial(check_imports, workspace, environment, expected),
        at_once=at_once,
    )
    notes: tuple[str, ...] = results[1]
    return notes


def _check_files(workspace: Workspace, environment: Path, expected: Expected) -> None:
    check_missing_libraries(find_needed_libraries(environment, expected.profile))
    check_compiler(workspace, environment)
    check_leaks(environment, build_places(workspace.cache.root))


def verified_mark(
    workspace: Workspace, environment: str, stub_sha256: str, expected: Expected
) -> Path:
    """Return the file that exists if an environment has passed its checks on this machine.

    Args:
        workspace: the cache.
        environment: the digest or key of the environment.
        stub_sha256: the digest of the stub.
        expected: the expected versions.
    """
    # Another environment, stub, release or lock needs a check of its own.
    key = key_of(
        _FORMAT, environment, stub_sha256, expected.release, expected.python, expected.versions
    )
    return workspace.cache.path("verified", key)
