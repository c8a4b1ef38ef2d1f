"""Checks a finished set before it is published; ``gen_vllm_env.sh verify`` runs the same on any repository.

In the order of the cost: the plan, before anything long starts; the files' digests; the archive, unpacked as Triton does;
the tree that comes out; an interpreter of it, started as Triton's launcher starts the stub.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_env.base import cache
from vllm_env.base.elf import needed_python
from vllm_env.base.errors import VllmEnvError
from vllm_env.triton.root import NEWEST_KNOWN, is_known

from . import launcher_check as start_check
from . import leaked_paths as traces
from . import tree_rules as archive_rules
from .tree_rules import REBUILD

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from vllm_env.lock.lock import Lock
    from vllm_env.triton.root import TritonRoot
    from vllm_env.triton.stub import Stub

    from .tree_rules import Expected

_FORMAT = 1  # raise it when a check below becomes stricter


def check_plan(lock: Lock, stub: Stub | None, triton: TritonRoot) -> tuple[str, ...]:
    """Refuse, before anything long starts, what Triton would refuse or what would break at the first request.

    Args:
        lock: what will be installed.
        stub: the stub that will be used, None if it is to be built from source.
        triton: the server's root.

    Returns:
        Notes for the person, such as that the release is newer than the table of rules.

    Raises:
        VllmEnvError: naming the rule and the remedy.
    """
    if stub is not None:
        python = ".".join(lock.python.split(".")[:2])
        check_stub_python(stub, python)
        check_stub_release(stub.release, triton.release)
    versions = lock.versions()
    if "setuptools" not in versions:
        raise VllmEnvError(
            "The environment has no setuptools.",
            cause="torch.utils.cpp_extension imports it, and vLLM that.",
            remedy="Add it: --with setuptools.",
        )
    archive_rules.check_numpy(versions.get("numpy", ""), triton.release)
    if is_known(triton.release):
        return ()
    row = f"the rules of {triton.rules.since}, the nearest known ones, are applied"
    return (f"Triton {triton.release} is not in the table of releases, which ends with {NEWEST_KNOWN}: {row}",)


def check_stub_python(stub: Stub, python: str) -> None:
    """Refuse a stub that embeds another Python than the environment's (``3.11``).

    Raises:
        VllmEnvError: naming both and the remedy.
    """
    needed = needed_python(stub.path)
    if needed != python:
        raise VllmEnvError(
            f"The stub {stub.path} embeds Python {needed}, the environment has {python}.",
            cause="A stub loads the libpython that it was built for.",
            remedy=f"Use --python {needed}, or --stub source." if needed else "Use --stub source.",
        )


def check_stub_release(stub_release: str, server_release: str) -> None:
    """Refuse a stub of another Triton release than the server's (``24.10``).

    Raises:
        VllmEnvError: naming both and the remedy.
    """
    if stub_release != server_release:
        raise VllmEnvError(
            f"The stub is of Triton {stub_release}, the server of {server_release}.",
            cause="They share memory whose layout changes between releases.",
            remedy="Use --stub source, or the Triton root of the stub's release.",
        )


def verify_archive(
    archive: Path,
    expected: Expected,
    root: Path,
    triton: TritonRoot | None = None,
    *,
    unpacked: int = 0,
    report: Callable[[str], None] = lambda _: None,
) -> tuple[str, ...]:
    """Unpack an archive as Triton does and check what comes out, down to an import of vLLM.

    Args:
        archive: the ``.tar.gz``.
        expected: what must be in it.
        root: the cache's folder; the archive is unpacked below it and removed again.
        triton: the Triton root, whose own libarchive is used if it brings one.
        unpacked: bytes that the archive unpacks to, 0 if that is not known.
        report: called with the step that begins.

    Returns:
        Notes for the person: what is not wrong, but costs time at each start.

    Raises:
        VllmEnvError: naming the rule and the remedy.
    """
    size = archive.stat().st_size if archive.exists() else 0
    cache.require_space(root, (unpacked or 5 * size) * 11 // 10, "unpacking the archive to verify it")
    with cache.staging(root) as staging:
        report("unpacked with libarchive")
        environment = staging / "0"  # as Triton names it
        archive_rules.unpack(archive, environment, root, triton.path if triton else None, expected.members)
        return verify_directory(environment, expected, root, report=report)


def verify_directory(
    environment: Path, expected: Expected, root: Path, *, report: Callable[[str], None] = lambda _: None
) -> tuple[str, ...]:
    """Check an unpacked environment, down to an import of vLLM; return notes as ``verify_archive`` does.

    Raises:
        VllmEnvError: naming the rule and the remedy.
    """
    report("rules of the loader")
    archive_rules.check_tree(environment, expected)
    report("traces of the build")
    traces.check_traces(environment, traces.build_places(root))
    report("imports without activation")
    started, _ = start_check.check_start(environment, expected, root)
    if not started.stale:
        return ()
    named = ", ".join(started.stale[:3])
    return (
        f"{len(started.stale)} of {len(started.files)} modules have no bytecode that fits ({named}, …): slower starts",
    )


def verified_key(environment: str, stub_sha256: str, expected: Expected) -> str:
    """Return the key of a verification: of which environment (its digest or key), with which stub, against what."""
    return cache.key_of(_FORMAT, environment, stub_sha256, expected.release, expected.python, expected.versions)


def is_verified(root: Path, key: str) -> bool:
    """Tell whether an environment passed on this machine before; one that was packed and never passed did not."""
    return (root / "verified" / key).is_file()


def mark_verified(root: Path, key: str) -> None:
    """Remember that an environment passed."""
    (root / "verified").mkdir(parents=True, exist_ok=True)
    (root / "verified" / key).touch()


def check_files(model: Path, archive: dict[str, object], stub: dict[str, object]) -> None:
    """Compare a published model's files with its manifest.

    Raises:
        VllmEnvError: a file is missing or not the manifest's.
    """
    for record in (archive, stub):
        file = model / str(record["name"])
        if file.is_dir():
            continue
        if not file.is_file():
            raise VllmEnvError(f"{file} is missing.", cause="The manifest names it.", remedy=REBUILD)
        if file.stat().st_size != record["size"] or cache.file_sha256(file) != record["sha256"]:
            raise VllmEnvError(
                f"{file} is not what {model / 'vllm_env.json'} says.",
                cause="It was changed or cut off.",
                remedy=REBUILD,
            )
