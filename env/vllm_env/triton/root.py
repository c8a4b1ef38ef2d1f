"""The Triton root: its release, its stubs, and the requirements of its Python backend on an environment."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from vllm_env.base.elf import needed_python
from vllm_env.base.errors import UsageError, VllmEnvError

STUB_NAME = "triton_python_backend_stub"


@dataclass(frozen=True)
class ReleaseRules:
    """The requirements of one Triton release on an environment.

    Sources: CMakeLists.txt, src/pb_env.cc and src/stub_launcher.cc of python_backend, which has a branch ``rYY.MM`` per release.
    """

    since: str
    glibc: int
    """Minor version of the container's glibc (Ubuntu 20.04 2.31, 22.04 2.35, 24.04 2.39); wheels are chosen for it."""
    numpy_bound: str
    """The required NumPy, or "": a stub with pybind11 2.10 cannot read the arrays of NumPy 2."""
    activates: bool
    """Whether the launcher sources ``bin/activate``. Since 25.08 it only sets PATH, LD_LIBRARY_PATH and VIRTUAL_ENV."""
    secure_extraction: bool
    """Whether the extraction refuses ``..``, absolute paths and writing through symbolic links (26.06)."""


CONTAINER_ROOT = Path("/opt/tritonserver")

# Oldest first. For a release, the newest row that is not newer than the release applies.
RELEASES = (
    ReleaseRules("23.01", 31, "numpy<2", activates=True, secure_extraction=False),
    ReleaseRules("23.05", 35, "numpy<2", activates=True, secure_extraction=False),
    ReleaseRules("24.11", 39, "", activates=True, secure_extraction=False),
    ReleaseRules("25.08", 39, "", activates=False, secure_extraction=False),
    ReleaseRules("26.06", 39, "", activates=False, secure_extraction=True),
)
NEWEST_KNOWN = "26.07"

# From NVIDIA's release notes: server 2.51 is 24.10, and each month has a new minor version. But 25.07 came as 2.59.1, so 2.60
# is 25.08 and 2.69 is 26.05.
_KNOWN_MINOR, _KNOWN_RELEASE = 51, (24, 10)
_OLDEST_MINOR = 30


@dataclass(frozen=True)
class TritonRoot:
    """A Triton installation with ``bin/tritonserver`` and ``backends/python``; its release is like ``24.10``."""

    path: Path
    release: str
    rules: ReleaseRules
    stubs: dict[str, Path] = field(default_factory=dict)
    """Ready-made stubs by Python version, such as ``3.11``."""

    @property
    def binary(self) -> Path:
        """Return the path of the server's program."""
        return self.path / "bin" / "tritonserver"

    @property
    def is_there(self) -> bool:
        """Return whether it is installed. A dry run may know a root that a build would first make."""
        return self.binary.is_file()


def rules_of(release: str) -> ReleaseRules:
    """Return the newest row that is not newer than ``release`` (``YY.MM``); for an older release, the first row."""
    return next(
        (row for row in reversed(RELEASES) if _ordinal(row.since) <= _ordinal(release)), RELEASES[0]
    )


def is_known(release: str) -> bool:
    """Return whether the table was checked for this release; for a newer one, the newest row is only an assumption."""
    return _ordinal(RELEASES[0].since) <= _ordinal(release) <= _ordinal(NEWEST_KNOWN)


def _ordinal(release: str) -> tuple[int, int]:
    year, month = release.split(".")[:2]
    return int(year), int(month)


def release_of_server(version: str) -> str:
    """Return the container release (``24.10``) of a server version (``2.51.0``).

    Raises:
        VllmEnvError: the version is older than the table.
    """
    numbers = [int(n) for n in version.split(".")[:3]]
    minor = numbers[1]
    months = (_KNOWN_RELEASE[0] * 12 + _KNOWN_RELEASE[1] - 1) + (minor - _KNOWN_MINOR)
    # 25.06 and 25.07 share the minor version 59, so each later release is one month further on.
    if numbers > [2, 59, 0]:
        months += 1
    if minor < _OLDEST_MINOR:
        raise VllmEnvError(
            f"tritonserver {version} is older than this tool knows.",
            remedy="Use Triton 23.01 or newer.",
        )
    return f"{months // 12}.{months % 12 + 1:02d}"


def open_root(path: Path) -> TritonRoot:
    """Read a Triton root.

    Raises:
        UsageError: the folder has no tritonserver with a Python backend, or its release is unknown.
    """
    for needed in ("bin/tritonserver", "backends/python/libtriton_python.so"):
        if not (path / needed).is_file():
            raise UsageError(
                f"--triton-root {path} is not a Triton installation: it has no {needed}.",
                remedy="Give the folder that holds bin/ and backends/ (in a Triton container /opt/tritonserver), "
                "or omit the option and a CPU Triton is provisioned into .triton/.",
            )
    release = _release(path)
    return TritonRoot(path, release, rules_of(release), _stubs(path))


def _release(path: Path) -> str:
    """Return the release of a root from its own files. The container's variables count only for the container's root."""
    in_container = path == CONTAINER_ROOT
    recorded = path / "RELEASE"  # written by provision.py
    variable = os.environ.get("NVIDIA_TRITON_SERVER_VERSION", "") if in_container else ""
    named = recorded.read_text().strip() if recorded.is_file() else variable
    if re.fullmatch(r"\d\d\.\d\d", named):
        return named
    version_file = path / "TRITON_VERSION"
    variable = (
        os.environ.get("TRITON_VERSION") or os.environ.get("TRITON_SERVER_VERSION", "")
        if in_container
        else ""
    )
    version = version_file.read_text().strip() if version_file.is_file() else variable
    if re.match(r"\d+\.\d+", version):
        return release_of_server(version)
    raise UsageError(
        f"The release of the Triton in {path} is not known: it has no TRITON_VERSION file.",
        cause=""
        if not in_container
        else "NVIDIA_TRITON_SERVER_VERSION, which its containers set, is not set either.",
        remedy=f"Write its release, such as 26.06, into {recorded}.",
    )


def _stubs(path: Path) -> dict[str, Path]:
    candidates = [
        path / "backends" / "python" / STUB_NAME,
        *path.glob(f"python_backend_stubs/*/{STUB_NAME}"),
    ]
    return {version: stub for stub in candidates if (version := needed_python(stub))}
