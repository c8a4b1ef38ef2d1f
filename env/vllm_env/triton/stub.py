"""The stub: the program ``triton_python_backend_stub`` that embeds the environment's Python for one Triton release.

It is tied to the Python version, whose libpython it loads, and to the Triton release, with which it shares memory whose
layout changes between releases. The Triton root's own is taken where it fits, else one is built (stub_source.py).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vllm_env.base.errors import VllmEnvError
from vllm_env.base.filesystem import file_sha256
from vllm_env.base.workspace import Workspace

from . import stub_source
from .root import TritonRoot
from .stub_check import check_stub
from .stub_source import StubOptions

StubMode = Literal["auto", "prebuilt", "source"]


@dataclass(frozen=True)
class Stub:
    """A stub for one Python (``3.11``) and one Triton release (``24.10``); ``origin`` is ``prebuilt`` or ``source``."""

    path: Path
    python: str
    release: str
    sha256: str
    size: int
    origin: str


@dataclass(frozen=True)
class StubPlan:
    """Which stub will be used; ``python`` is the full version (``3.11.7``), ``prebuilt`` is None if one will be built."""

    triton: TritonRoot
    python: str
    options: StubOptions
    prebuilt: Stub | None = None

    @property
    def minor(self) -> str:
        """The Python version that the stub is tied to, such as ``3.11``."""
        return ".".join(self.python.split(".")[:2])

    @property
    def identity(self) -> str:
        """What tells the stub from others: its digest, or the key under which it will be built."""
        if self.prebuilt:
            return self.prebuilt.sha256
        return stub_source.source_key(self.triton.release, self.python, self.options)


def plan_stub(workspace: Workspace, triton: TritonRoot, python: str, mode: StubMode, options: StubOptions) -> StubPlan:
    """Choose the stub for a full Python version (``3.11.7``) before anything long starts; VllmEnvError if there can be none."""
    plan = StubPlan(triton, python, options)
    path = triton.stubs.get(plan.minor) if mode != "source" else None
    if path:
        return StubPlan(triton, python, options, describe(path, plan.minor, triton.release, "prebuilt"))
    if mode == "prebuilt":
        raise VllmEnvError(
            f"--python {plan.minor}: the Triton {triton.release} in {triton.path} has no stub for it.",
            cause=f"It has stubs for Python {_versions(triton)}.",
            remedy="Pick one of these with --python, or build one with --stub source.",
        )
    try:
        stub_source.check_buildable(workspace, triton.release, python, options)
    except VllmEnvError as error:
        if mode != "auto":
            raise
        raise VllmEnvError(
            f"--python {plan.minor}: the Triton {triton.release} in {triton.path} has no stub for it, and none can be built.",
            cause=f"It has stubs for Python {_versions(triton)}. {error.what}",
            remedy=f"Pick one of these with --python. Or: {error.remedy}",
        ) from error
    return plan


def make_stub(workspace: Workspace, plan: StubPlan, prefix: Path) -> Stub:
    """Return the planned stub, or the one built from source, checked and started once in a prefix; VllmEnvError if it fails."""
    stub = plan.prebuilt
    if stub is None:
        path = stub_source.build_stub(workspace, plan.triton, plan.python, prefix, plan.options)
        stub = describe(path, plan.minor, plan.triton.release, "source")
    check_stub(stub.path, plan.minor, plan.triton, prefix)
    return stub


def describe(path: Path, python: str, release: str, origin: str) -> Stub:
    """Return a stub's record, with its digest and size; ``python`` is ``3.11``."""
    return Stub(path, python, release, file_sha256(path), path.stat().st_size, origin)


def _versions(triton: TritonRoot) -> str:
    return ", ".join(sorted(triton.stubs, key=lambda v: int(v.split(".")[1]))) or "none"
