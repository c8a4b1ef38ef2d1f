"""The Triton root: its release, its stubs, and its Python backend's rules for an environment."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vllm_env.base.elf import needed_python
from vllm_env.base.errors import UsageError, VllmEnvError

STUB_NAME = "triton_python_backend_stub"
STUB_LIBRARIES = "stub_lib"
"""The folder next to the stub with the libpython that it starts with (stub.py)."""

# Up to 25.07 the Python backend starts a stub by a line of bash, without quotes. The line has the
# paths of the model, the stub, the environment and the backend, and the model's name. The stub
# itself, before 24.11, decodes paths as ASCII.
_STRANGE = re.compile(r"[^\w@%+=:,./-]", re.ASCII)


# Sources: CMakeLists.txt, src/pb_env.cc and src/stub_launcher.cc of python_backend, which has a
# branch ``rYY.MM`` per release.
@dataclass(frozen=True)
class ReleaseRules:
    """The rules of one Triton release for an environment.

    Attributes:
        since: the first release with these rules.
        python: the Python of the container's own stub.
        glibc: minor version of the container's glibc, for which wheels are chosen.
        numpy_bound: the required NumPy, or "".
        activates: whether the launcher sources ``bin/activate``.
        secure_extraction: whether the extraction refuses ``..``, absolute paths and writing through
            symbolic links.
    """

    since: str
    python: str
    glibc: int
    numpy_bound: str
    activates: bool
    secure_extraction: bool


CONTAINER_ROOT = Path("/opt/tritonserver")

# Oldest first. For a release, the newest row that is not newer than the release applies.
# 23.05: Ubuntu 22.04 with glibc 2.35 and Python 3.10 replaces 20.04 with 2.31 and 3.8.
# 24.11: Ubuntu 24.04 with glibc 2.39 and Python 3.12. The stub has pybind11 2.12; 2.10 cannot read
# NumPy 2 arrays.
# 25.08: the launcher only sets PATH, LD_LIBRARY_PATH and VIRTUAL_ENV.
# 26.06: libarchive's SECURE flags are set.
RELEASES = (
    ReleaseRules("23.01", "3.8", 31, "numpy<2", activates=True, secure_extraction=False),
    ReleaseRules("23.05", "3.10", 35, "numpy<2", activates=True, secure_extraction=False),
    ReleaseRules("24.11", "3.12", 39, "", activates=True, secure_extraction=False),
    ReleaseRules("25.08", "3.12", 39, "", activates=False, secure_extraction=False),
    ReleaseRules("26.06", "3.12", 39, "", activates=False, secure_extraction=True),
)
NEWEST_KNOWN = "26.07"


def is_plain(path: str | Path) -> bool:
    """Return whether every Triton can use a path or a model's name."""
    return not _STRANGE.search(str(path))


@dataclass(frozen=True)
class TritonRoot:
    """A Triton installation with ``bin/tritonserver`` and ``backends/python``.

    Attributes:
        path: the root, such as ``/opt/tritonserver``.
        release: the release, such as ``24.10``.
        rules: the release's rules.
        stubs: ready-made stubs by Python version, such as ``3.11``.
        is_elsewhere: whether it is on another machine, so that only its release is known.
    """

    path: Path
    release: str
    rules: ReleaseRules
    stubs: dict[str, Path] = field(default_factory=dict)
    is_elsewhere: bool = False

    @property
    def binary(self) -> Path:
        """Return the path of the server's program."""
        return self.path / "bin" / "tritonserver"

    @property
    def is_there(self) -> bool:
        """Return whether it is installed. A dry run may know a root that a build would make."""
        return self.binary.is_file()


def rules_of(release: str) -> ReleaseRules:
    """Return the rules of a release (``YY.MM``); for one older than the table, the first row."""
    rules = RELEASES[0]
    for row in RELEASES:
        if _ordinal(row.since) <= _ordinal(release):
            rules = row
    return rules


def is_known(release: str) -> bool:
    """Return whether the table was checked for this release."""
    # For a newer one, the newest row is only an assumption.
    return _ordinal(RELEASES[0].since) <= _ordinal(release) <= _ordinal(NEWEST_KNOWN)


def backend_arguments(program: Path) -> list[str]:
    """Return the options with which a root's ``bin/tritonserver`` finds its backends."""
    root = program.absolute().parent.parent
    # By default the server looks in /opt/tritonserver/backends. The launcher of a root that
    # provision.py made names the root's own.
    finds_them = root == CONTAINER_ROOT or (root / "libexec" / "tritonserver").is_file()
    if finds_them or not (root / "backends" / "python").is_dir():
        return []
    return [f"--backend-directory={root / 'backends'}"]


def _ordinal(release: str) -> tuple[int, ...]:
    return tuple(int(number) for number in release.split(".")[:2])


def release_of_server(version: str) -> str:
    """Return the container release (``24.10``) of a server version (``2.51.0``).

    Raises:
        VllmEnvError: the version is older than the table.
    """
    # A server that was built from sources may have a version such as 2.71.0dev.
    numbers = [int(number) for number in re.findall(r"\d+", version)[:3]]
    minor = numbers[1]
    # All versions begin with 2. 2.30 is 23.01, the first row of the table.
    if minor < 30:
        raise VllmEnvError(
            f"tritonserver {version} is older than this tool knows.",
            remedy="Use Triton 23.01 or newer.",
        )
    # From NVIDIA's release notes: 2.51 is 24.10, and each month has a new minor version. Months are
    # counted from January 2000 on, so October 2024 is 24 * 12 + 9.
    months = 24 * 12 + 9 + minor - 51
    # But 25.07 came as 2.59.1, with the minor version of 25.06. So 2.60 is 25.08 and 2.69 is 26.05.
    if numbers > [2, 59, 0]:
        months += 1
    year, month = divmod(months, 12)
    return f"{year}.{month + 1:02d}"


def open_root(path: Path) -> TritonRoot:
    """Read a Triton root.

    Raises:
        UsageError: the folder has no tritonserver with a Python backend, or its release is unknown.
    """
    for needed in ("bin/tritonserver", "backends/python/libtriton_python.so"):
        if not (path / needed).is_file():
            raise UsageError(
                f"--triton-root {path} is not a Triton installation: it has no {needed}.",
                remedy="Give the folder that contains bin/ and backends/ (in a Triton container "
                f"{CONTAINER_ROOT}). Or omit the option: the build then makes a CPU Triton in "
                ".triton/.",
            )
    release = _release(path)
    return TritonRoot(path, release, rules_of(release), _stubs(path))


def _release(path: Path) -> str:
    """Return the release of a root from its own files, or from the container's variables.

    Raises:
        UsageError: neither of them names it.
    """
    # The variables are about the container's own Triton, not about one that a user has mounted.
    in_container = path == CONTAINER_ROOT
    variables: Mapping[str, str] = os.environ if in_container else {}
    # provision.py writes this file.
    recorded = path / "RELEASE"
    release = _content(recorded) or variables.get("NVIDIA_TRITON_SERVER_VERSION", "")
    if re.fullmatch(r"\d\d\.\d\d", release):
        return release
    # Else find it by the server's version.
    version = _content(path / "TRITON_VERSION")
    for name in ("TRITON_VERSION", "TRITON_SERVER_VERSION"):
        version = version or variables.get(name, "")
    if re.match(r"\d+\.\d+", version):
        return release_of_server(version)
    raise UsageError(
        f"The release of the Triton in {path} is not known: it has no TRITON_VERSION file.",
        cause="NVIDIA_TRITON_SERVER_VERSION, which its containers set, is not set either."
        if in_container
        else "",
        remedy=f"Write its release, such as 26.06, into {recorded}.",
    )


def _content(file: Path) -> str:
    """Return the stripped text of a file, or "" if it is missing."""
    return file.read_text().strip() if file.is_file() else ""


def _stubs(path: Path) -> dict[str, Path]:
    """Return the stubs of a root by the Python whose libpython they need, such as ``3.11``."""
    # A container has one stub, next to the backend. A root from the wheel has one per Python, too.
    stubs = {}
    for stub in (
        path / "backends" / "python" / STUB_NAME,
        *path.glob(f"python_backend_stubs/*/{STUB_NAME}"),
    ):
        version = needed_python(stub)
        if version:
            stubs[version] = stub
    return stubs
