"""The stub: the program ``triton_python_backend_stub`` that embeds the environment's Python for one Triton release.

It is tied to the Python version, whose libpython it loads, and to the Triton release, with which it shares memory whose
layout changes between releases. The Triton root's own is taken where it fits, else one is built (stub_source.py). Either is
checked before it is used: as an ELF file against the libraries that it will meet, and by starting it.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vllm_env.base.elf import newest_defined, read_dynamic_section
from vllm_env.base.errors import VllmEnvError
from vllm_env.base.filesystem import file_sha256
from vllm_env.base.process import run
from vllm_env.base.workspace import Workspace

from . import stub_source
from .root import TritonRoot
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
    """Which stub will be used; ``python`` is the full version (``3.11.7``).

    ``prebuilt`` is one of the Triton root's, which a dry run may know before it is there; it is None if one will be built.
    """

    triton: TritonRoot
    python: str
    options: StubOptions
    prebuilt: Path | None = None

    @property
    def minor(self) -> str:
        """The Python version that the stub is tied to, such as ``3.11``."""
        return ".".join(self.python.split(".")[:2])

    @property
    def identity(self) -> str:
        """What tells the stub from others: its digest, or the key under which it will be built."""
        if self.prebuilt:
            return file_sha256(self.prebuilt)
        return stub_source.source_key(self.triton.release, self.python, self.options)


def plan_stub(workspace: Workspace, triton: TritonRoot, python: str, mode: StubMode, options: StubOptions) -> StubPlan:
    """Choose the stub for a full Python version (``3.11.7``) before anything long starts; VllmEnvError if there can be none."""
    plan = StubPlan(triton, python, options)
    path = triton.stubs.get(plan.minor) if mode != "source" else None
    if path:
        return StubPlan(triton, python, options, path)
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
    path = plan.prebuilt or stub_source.build_stub(workspace, plan.triton, plan.python, prefix, plan.options)
    check_stub(path, plan.minor, plan.triton, prefix)
    origin = "prebuilt" if plan.prebuilt else "source"
    return Stub(path, plan.minor, plan.triton.release, file_sha256(path), path.stat().st_size, origin)


def _versions(triton: TritonRoot) -> str:
    return ", ".join(sorted(triton.stubs, key=lambda v: int(v.split(".")[1]))) or "none"


_SYSTEM_FOLDERS = ("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", "/usr/lib")
_CPP = "libstdc++.so.6"


def check_stub(stub: Path, python: str, triton: TritonRoot, environment: Path) -> None:
    """Refuse, with a VllmEnvError, a stub that would not start in a prefix or unpacked environment of this Python (``3.11``)."""
    needs = read_dynamic_section(stub)
    if needs is None:
        raise VllmEnvError(f"The stub {stub} is not a dynamic ELF program.", remedy="Use --stub source.")
    wanted = next((name for name in needs.needed if name.startswith("libpython")), "no libpython")
    if not re.match(rf"libpython{re.escape(python)}\.", wanted) or not (environment / "lib" / wanted).exists():
        raise VllmEnvError(
            f"The stub {stub} needs {wanted}, the environment has Python {python}.",
            cause="A stub loads the libpython that it was built for from the environment's lib/.",
            remedy="Use the --python that it was built for, or --stub source.",
        )
    libc = re.findall(r"\d+", os.confstr("CS_GNU_LIBC_VERSION") or "")  # "glibc 2.36"; empty for another C library
    provided = tuple(int(n) for n in libc)
    remedy = "Build it here with --stub source, or run in the container that will serve it."
    _check_newest(f"{stub} needs GLIBC", needs.glibc, "this machine's C library", provided, remedy)
    library = cpp_library(environment)  # the first in LD_LIBRARY_PATH
    if library:
        provided = newest_defined(library, "GLIBCXX_")
        remedy = "Add a newer libstdcxx-ng to the environment's conda packages, or build the stub here: --stub source."
        _check_newest(f"{stub} needs GLIBCXX", needs.glibcxx, f"{library}, which is loaded first,", provided, remedy)
    start_stub(stub, triton, environment)


def _check_newest(needs: str, needed: tuple[int, ...], by: str, provided: tuple[int, ...], remedy: str) -> None:
    if provided and needed > provided:
        shown, has = (".".join(map(str, version)) for version in (needed, provided))
        raise VllmEnvError(f"The stub {needs} {shown}, and {by} has {has}.", remedy=remedy)


def cpp_library(environment: Path) -> Path | None:
    """Return the libstdc++ that wins in an environment: its own, else the system's; None if neither is found."""
    candidates = [environment / "lib" / _CPP, *(Path(folder) / _CPP for folder in _SYSTEM_FOLDERS)]
    return next((path for path in candidates if path.exists()), None)


def start_stub(stub: Path, triton: TritonRoot, environment: Path) -> None:
    """Start a stub without arguments; VllmEnvError unless it says so and ends with status 1, as tritonserver expects."""
    inherited = os.environ.get("LD_LIBRARY_PATH", "")
    folders = [str(environment / "lib"), str(triton.path / "lib"), *inherited.split(":")]
    path = ":".join(dict.fromkeys(f for f in folders if f))
    # bash itself runs without the environment's libraries, which may not fit it
    text = 'LD_LIBRARY_PATH=$1 "$0"; printf "\\nstatus %s\\n" $?'
    output = run(["bash", "-c", text, stub, path], what=f"start the stub {stub}")
    *said, status = output.strip().splitlines()
    if status == "status 1" and "error while loading shared libraries" not in output:
        return
    missing = re.search(r"(\S+): cannot open shared object file", output)
    raise VllmEnvError(
        f"The stub {stub} does not start ({status}): {' '.join(said)[-300:] or 'it printed nothing'}",
        cause=f"{missing.group(1).strip(':')} is not found."
        if missing
        else "It is not a stub of the Python backend, or is damaged.",
        remedy="Build one here: --stub source.",
    )
