"""What an environment must be for Triton to load it: the loader's own rules, and what would break at the first request.

The loader's rules are replayed by unpacking the archive with libarchive (libarchive_worker.py). The others read the unpacked
tree, so that they hold for the layout ``directory`` as well.
"""

import ctypes.util
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from vllm_env.base.errors import VllmEnvError
from vllm_env.base.process import run
from vllm_env.triton.root import rules_of

REBUILD = "Build it again: ./gen_vllm_env.sh."
_OF_PYTHON = ("pip", "setuptools", "wheel")  # an interpreter's conda package may bring them
_MAGIC = {b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ\0": "xz", b"BZh": "bzip2", b"PK\x03\x04": "ZIP", b"\x04\x22\x4d\x18": "lz4"}
# libarchive's messages (archive_write_disk_posix.c, archive_read_support_format_tar.c, …filter_gzip.c) and what they mean
_MEANING = (
    (r"Path contains '\.\.'", "Since 26.06 Triton refuses members whose path contains '..' (SECURE_NODOTDOT)."),
    (r"Path is absolute", "Since 26.06 Triton refuses members with an absolute path (SECURE_NOABSOLUTEPATHS)."),
    (r"through symlink", "Since 26.06 Triton refuses to write through a symbolic link (SECURE_SYMLINKS)."),
    (r"can't be converted", "tritonserver runs in the C locale, in which libarchive cannot convert this name."),
    (r"[Tt]runcated|premature end|Damaged tar|invalid compressed|decompression failed", "The archive is cut off or damaged."),
    (r"Unrecognized archive format", "Triton reads tar archives, compressed with gzip or not at all."),
    (r"No space left|disk full", "The file system is full."),
)  # fmt: skip


@dataclass(frozen=True)
class Expected:
    """What an environment is to be, by its lock or its manifest.

    ``python`` (``3.11``) and ``release`` (``24.10``) are the stub's, ``versions`` are those of distributions by their
    normalised names (``complete``: of all that are installed), ``members`` is the archive's number of them, 0 if unknown.
    """

    python: str
    release: str
    versions: dict[str, str]
    complete: bool = False
    members: int = 0
    profile: str = "cpu"


def unpack(archive: Path, folder: Path, triton: Path | None = None, members: int = 0) -> None:
    """Unpack an archive of so many members (0: not known) as Triton would, by its own libarchive if its root brings one.

    A VllmEnvError names the rule by which Triton refuses it.
    """
    _check_compression(archive)
    folder.mkdir(parents=True)
    answer = _replay(archive, folder, triton)
    if "refused" in answer:
        raise _explained(archive, answer["refused"])
    if members and answer["members"] != members:
        raise VllmEnvError(
            f"{archive} holds {answer['members']} members, and not the {members} that were packed.",
            cause="It was cut off between two members, which libarchive takes for its end.",
            remedy=REBUILD,
        )


def _check_compression(archive: Path) -> None:
    with archive.open("rb") as stream:
        head = stream.read(8)
    kind = next((name for magic, name in _MAGIC.items() if head.startswith(magic)), None)
    if kind:
        raise VllmEnvError(
            f"{archive} is compressed with {kind}.",
            cause="Triton reads tar archives, compressed with gzip or not at all.",
            remedy=REBUILD,
        )


def _replay(archive: Path, folder: Path, triton: Path | None) -> dict[str, Any]:
    libraries = triton.absolute() / "lib" if triton else None
    own = sorted(libraries.glob("libarchive*.so.13*")) if libraries else []
    library = str(own[0]) if own else ctypes.util.find_library("archive")
    if library is None:
        raise VllmEnvError(
            "The loader's rules cannot be checked: this machine has no libarchive.so.13.",
            remedy="Install it (apt-get install libarchive13), or run in a Triton container, which has it.",
        )
    environment = {"LIBARCHIVE": library, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    if own:
        environment["LD_LIBRARY_PATH"] = str(libraries)
    command = [sys.executable, "-m", "vllm_env.verify.libarchive_worker", archive.resolve(), folder.absolute()]
    output = run(command, what=f"unpack {archive.name} as Triton does", env=environment, cwd=Path(environment["PYTHONPATH"]))
    answer: dict[str, Any] = json.loads(output.splitlines()[-1])
    return answer


def _explained(archive: Path, refused: dict[str, Any]) -> VllmEnvError:
    meaning = next((text for pattern, text in _MEANING if re.search(pattern, refused["message"])), "")
    place = f" at {refused['member']}" if refused["member"] else ""
    said = f"{refused['call']}() answers {refused['status']}: {refused['message']}"
    full = "full" in meaning
    return VllmEnvError(
        f"{archive} cannot be unpacked{place}.",
        cause=f"{meaning} {said}".strip(),
        remedy="Free some space, or point VLLM_ENV_CACHE to a larger file system." if full else REBUILD,
    )


def check_tree(environment: Path, expected: Expected) -> None:
    """Refuse, with a VllmEnvError, an unpacked environment that Triton refuses, or that would break at the first request."""
    if not (environment / "bin" / "activate").is_file():
        raise VllmEnvError(
            f"{environment} has no bin/activate.",
            cause="Triton refuses an environment without it (stub_launcher.cc), even where it does not run it.",
            remedy=REBUILD,
        )
    packages = _check_python(environment, expected.python)
    _check_editable(environment, packages)
    _check_distributions(installed(packages), expected)


def _check_python(environment: Path, python: str) -> Path:
    """Return the folder of the packages of the stub's Python."""
    packages = environment / "lib" / f"python{python}" / "site-packages"
    libraries = {p.name for p in environment.glob("lib/libpython3.*.so.*")}
    if not any(name.startswith(f"libpython{python}.so") for name in libraries) or not packages.is_dir():
        has = ", ".join(sorted(libraries)) or "none"
        raise VllmEnvError(
            f"{environment} has no Python {python}, which the stub embeds.",
            cause=f"The stub loads libpython{python} from lib/, and there is: {has}.",
            remedy=f"Build it with --python {python}, or with a stub of its own Python: --stub source.",
        )
    return packages


def _check_editable(environment: Path, packages: Path) -> None:
    found = [p.name for p in (*packages.glob("__editable__*"), *packages.glob("*.egg-link"))]
    for file in packages.glob("*.dist-info/direct_url.json"):
        record = json.loads(file.read_text("utf-8"))
        found += [file.parent.name] if record.get("dir_info", {}).get("editable") else []
    for file in packages.glob("*.pth"):
        lines = (line.strip() for line in file.read_text("utf-8", "replace").splitlines())
        outside = [p for p in lines if p.startswith("/") and not Path(p).is_relative_to(environment)]
        found += [f"{file.name} (to {outside[0]})"] if outside else []
    if found:
        raise VllmEnvError(
            f"{environment} has packages that are installed as editable: {', '.join(sorted(found))}.",
            cause="Their code is in the folder that they were installed from, and not in the environment.",
            remedy="Install them as wheels; a source tree of vLLM with --vllm-source, which builds one.",
        )


def installed(packages: Path) -> dict[str, str]:
    """Return the versions of the distributions in a ``site-packages`` folder by their normalised names."""
    stems = (p.name.removesuffix(".dist-info").rpartition("-") for p in packages.glob("*.dist-info"))
    return {str(canonicalize_name(name)): version for name, _, version in stems if name}


def _check_distributions(found: dict[str, str], expected: Expected) -> None:
    check_versions(found, expected.release)
    wrong = differing(found, expected.versions)
    if expected.complete:
        wrong += [f"{name} {found[name]} is not in it" for name in found if name not in {*expected.versions, *_OF_PYTHON}]
    if wrong:
        raise VllmEnvError(
            f"The environment is not what its lock says: {'; '.join(wrong[:5])}{' …' if len(wrong) > 5 else ''}.",
            cause="It was changed after it was built, or the lock is another one's.",
            remedy=REBUILD,
        )


def differing(found: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    """Return a line for each distribution that is missing or has another version than is wanted; "" wants any."""
    return [
        f"{name} is {found.get(name, 'missing')} and not {version}"
        for name, version in wanted.items()
        if version and not is_same_version(found.get(name, ""), version)
    ]


def is_same_version(one: str, other: str) -> bool:
    """Tell whether version ``one`` is what ``other`` asks for, as PEP 440 has it: without a local part, any matches.

    PyTorch's wheels on the registry are 2.13.0 by their metadata, and 2.13.0+cu130 by ``torch.__version__``.
    """
    try:
        found, wanted = Version(one), Version(other)
    except InvalidVersion:
        return one == other
    return found == wanted or (wanted.local is None and Version(found.public) == wanted)


def check_versions(versions: Mapping[str, str], release: str) -> None:
    """Refuse distributions without setuptools, or with a NumPy 2 whose arrays a stub of this release cannot read."""
    if "setuptools" not in versions:
        raise VllmEnvError(
            "The environment has no setuptools.",
            cause="torch.utils.cpp_extension imports it, and vLLM that.",
            remedy="Add it: --with setuptools.",
        )
    numpy = versions.get("numpy", "")
    if rules_of(release).numpy_bound and int(numpy.partition(".")[0] or 0) >= 2:
        raise VllmEnvError(
            f"NumPy {numpy} does not go with a stub of Triton {release}.",
            cause="Stubs before 24.11 have pybind11 2.10, which cannot read arrays of NumPy 2: the first request aborts them.",
            remedy="Leave NumPy to the tool (it asks for numpy<2), or use Triton 24.11 or newer.",
        )
