"""The stub: the program ``triton_python_backend_stub`` that embeds the environment's Python for one Triton release.

It is tied to the Python version, whose libpython it loads, and to the Triton release, with which it shares memory whose
layout changes between releases. The Triton root's own is taken where it fits, else one is built (stub_source.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_env.base import cache
from vllm_env.base.errors import VllmEnvError

from . import stub_source
from .stub_check import check_stub
from .stub_source import StubOptions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .root import TritonRoot

__all__ = ["MODES", "Stub", "StubOptions", "make_stub", "plan_stub"]

MODES = ("auto", "prebuilt", "source")


@dataclass(frozen=True)
class Stub:
    """A stub for one Python version and one Triton release; ``origin`` is ``prebuilt`` or ``source``."""

    path: Path
    python: str
    release: str
    sha256: str
    size: int
    origin: str


def find_prebuilt(triton: TritonRoot, python: str) -> Stub | None:
    """Return the Triton root's own stub for a Python version (``3.11``), or None if it has none."""
    path = triton.stubs.get(python)
    return describe(path, python, triton.release, "prebuilt") if path else None


def describe(path: Path, python: str, release: str, origin: str) -> Stub:
    """Return a stub's record, with its digest and size."""
    return Stub(path, python, release, cache.file_sha256(path), path.stat().st_size, origin)


def require_prebuilt(triton: TritonRoot, python: str) -> Stub:
    """Return the Triton root's stub for a Python version.

    Raises:
        VllmEnvError: it has none; the message names the versions that it has.
    """
    found = find_prebuilt(triton, python)
    if found is None:
        raise VllmEnvError(
            f"--python {python}: the Triton {triton.release} in {triton.path} has no stub for it.",
            cause=f"It has stubs for Python {_versions(triton)}.",
            remedy="Pick one of these with --python, or build one with --stub source.",
        )
    return found


def plan_stub(triton: TritonRoot, python: str, mode: str, options: StubOptions) -> Stub | None:
    """Return the ready-made stub that will be used, or None if one is to be built; before anything long starts.

    Args:
        triton: the server's root.
        python: the environment's Python, such as ``3.11``.
        mode: one of ``MODES``.
        options: how it would be built.

    Raises:
        VllmEnvError: there is none and it cannot be built here, or it may not be.
    """
    if mode == "prebuilt":
        return require_prebuilt(triton, python)
    found = find_prebuilt(triton, python) if mode == "auto" else None
    if found is None:
        try:
            stub_source.check_tools(triton.release, options)
        except VllmEnvError as error:
            if mode != "auto":
                raise
            raise _none_to_be_had(triton, python, error) from error
    return found


def _none_to_be_had(triton: TritonRoot, python: str, build: VllmEnvError) -> VllmEnvError:
    return VllmEnvError(
        f"--python {python}: the Triton {triton.release} in {triton.path} has no stub for it, and none can be built.",
        cause=f"It has stubs for Python {_versions(triton)}. {build.what}",
        remedy=f"Pick one of these with --python. Or: {build.remedy}",
    )


def _versions(triton: TritonRoot) -> str:
    return ", ".join(sorted(triton.stubs, key=lambda v: int(v.split(".")[1]))) or "none"


def stub_identity(planned: Stub | None, triton: TritonRoot, python: str, options: StubOptions) -> str:
    """Return what tells a planned stub from others: its digest, or the key under which it will be built.

    ``python`` is the full version, such as ``3.11.7``.
    """
    return planned.sha256 if planned else stub_source.source_key(triton.release, python, options)


def make_stub(
    planned: Stub | None,
    triton: TritonRoot,
    prefix: Path,
    python: str,
    root: Path,
    options: StubOptions,
    report: Callable[[str], None] = lambda _: None,
) -> Stub:
    """Return the planned stub, or build one from source, or take that from the cache; checked and started once.

    Args:
        planned: what ``plan_stub`` returned.
        triton: the server's root.
        prefix: a finished prefix with the environment's Python.
        python: that Python's full version, such as ``3.11.7``.
        root: the cache's folder.
        options: where the sources are and how they are built.
        report: called with each step.

    Raises:
        VllmEnvError: it cannot be built, or would not start in the environment.
    """
    minor = ".".join(python.split(".")[:2])
    stub = planned
    if stub is None:
        path = stub_source.build_stub(triton, prefix, python, root, options, report)
        stub = describe(path, minor, triton.release, "source")
    check_stub(stub.path, minor, triton, prefix)
    return stub
