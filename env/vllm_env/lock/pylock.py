"""A lock: its inputs and the exact files, read from and written to ``pylock.toml`` (PEP 751).

Wheels are named by file, as in a wheelhouse next to the lock, and by hash. They have no URL of a
registry, so any mirror may serve them. ``[tool.vllm-env]`` has the parts that the standard does not
cover: the inputs and the interpreter's conda packages.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from packaging.pylock import Package, Pylock, PylockValidationError
from packaging.utils import parse_wheel_filename

from vllm_env.base.errors import VllmEnvError
from vllm_env.base.filesystem import write_whole
from vllm_env.base.machine import AMD64
from vllm_env.interpreter.layer import REMOTE_CHANNEL, CondaLayer, CondaPackage

from .pins import PinnedVllm
from .spec import Spec, read_toml
from .variants import cuda_of_versions

# A build that only PyTorch's own index has, such as ``torch==2.13.0+cpu``.
PYTORCH_INDEX = "pytorch"
"""The value of ``LockedWheel.index`` for PyTorch's own index."""
# A release for another CUDA version than the registry's, such as ``vllm==0.33.0+cu129``.
VLLM_INDEX = "vllm"
"""The value of ``LockedWheel.index`` for vLLM's own index."""


@dataclass(frozen=True)
class LockedWheel:
    """One wheel.

    Attributes:
        name: normalised name.
        version: its version.
        file: file name.
        sha256: hexadecimal digest.
        size: bytes; 0 if unknown.
        index: ``pytorch``, ``vllm``, or "" for the registries that pip is configured with.
        url: place of a file that no index has, such as a pinned wheel; else "".
    """

    name: str
    version: str
    file: str
    sha256: str
    size: int = 0
    index: str = ""
    url: str = ""

    @property
    def requirement(self) -> str:
        """Return the wheel as a line of a requirements file, with its hash."""
        what = f"{self.name} @ {self.url}" if self.url else f"{self.name}=={self.version}"
        return f"{what} --hash=sha256:{self.sha256}"


def versions_of(wheels: Iterable[LockedWheel]) -> dict[str, str]:
    """Return the version of each distribution by its normalised name."""
    return {wheel.name: wheel.version for wheel in wheels}


def requirements_of(wheels: Iterable[LockedWheel]) -> str:
    """Return wheels as a requirements file with hashes, for uv and pip."""
    return "".join(f"{wheel.requirement}\n" for wheel in wheels)


@dataclass(frozen=True)
class Inputs:
    """The values that a lock was resolved from, as in ``Spec``.

    ``pin`` is a requirement, without the folder of a pinned file.
    """

    profile: str
    pin: str
    distribution: str
    python: str
    torch_backend: str = ""
    requirements: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    wheel_index: str = ""
    git_url: str = ""
    triton_release: str = ""
    platform: str = AMD64.name

    def document(self) -> dict[str, Any]:
        """Return the values as a lock file has them."""
        values = dataclasses.asdict(self)
        # Most locks do not need these. Locks of earlier versions do not know them and stay valid.
        if not self.triton_release:
            del values["triton_release"]
        if self.platform == AMD64.name:
            del values["platform"]
        return values

    def drift(self, now: "Inputs") -> str:
        """Return how these inputs differ from ``now``, with both values; "" if they are equal."""
        differences = []
        for field in dataclasses.fields(self):
            old = getattr(self, field.name)
            new = getattr(now, field.name)
            if old != new:
                differences.append(f"{field.name} was {_shown(old)} and is {_shown(new)}")
        return "; ".join(differences)


def _shown(value: object) -> str:
    # A tuple is shown as a list, as the user writes it in the spec.
    return repr(list(value) if isinstance(value, tuple) else value)


@dataclass(frozen=True)
class Lock:
    """An exact environment: the conda layer that this machine installs, and the wheels."""

    spec: Spec
    vllm: PinnedVllm
    conda: CondaLayer
    wheels: tuple[LockedWheel, ...]
    inputs: Inputs

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the locked packages in hexadecimal."""
        packages = [dataclasses.asdict(p) for p in self.conda.packages]
        # Without their places: a mirror or another folder gives the same environment.
        wheels = sorted((w.name, w.version, w.sha256) for w in self.wheels)
        return hashlib.sha256(json.dumps([packages, wheels], sort_keys=True).encode()).hexdigest()

    @property
    def python(self) -> str:
        """Return the interpreter's full version, such as ``3.11.7``; if unknown, ``3.11``."""
        return self.conda.python if self.conda.packages else self.spec.python

    @property
    def download_size(self) -> int:
        """Return the bytes of all wheels whose size is known."""
        return sum(wheel.size for wheel in self.wheels)

    @property
    def cuda(self) -> str:
        """Return the CUDA version of the environment, such as ``12.9``; "" if it has none."""
        return cuda_of_versions(self.versions())

    def versions(self) -> dict[str, str]:
        """Return the version of each locked distribution by its normalised name."""
        return versions_of(self.wheels)


_TOOL = "vllm-env"
# Raise it when the tables of [tool.vllm-env] change.
_FORMAT = 1
_UPGRADE = "Resolve again with --upgrade, or restore the file from git."


@dataclass(frozen=True)
class LockFile:
    """The content of a lock file; ``layer`` is the interpreter from conda-forge, if locked."""

    inputs: Inputs
    wheels: tuple[LockedWheel, ...]
    layer: CondaLayer | None


def write_pylock(lock: Lock, file: Path) -> None:
    """Write a lock; the file appears completely or not at all."""
    tool: dict[str, Any] = {"format": _FORMAT, "inputs": lock.inputs.document()}
    # The local channel is not locked: each machine makes its package from its own interpreter.
    if lock.conda.channel == REMOTE_CHANNEL:
        tool["conda"] = {
            REMOTE_CHANNEL: [dataclasses.asdict(package) for package in lock.conda.packages]
        }
    # Sorted, so that equal locks are equal files and a new one has a short diff.
    wheels = sorted(lock.wheels, key=lambda wheel: wheel.name)
    document = {
        "lock-version": "1.0",
        "created-by": "gen_vllm_env.sh --upgrade",
        "requires-python": f"=={lock.spec.python}.*",
        "packages": [_package_entry(wheel) for wheel in wheels],
        "tool": {_TOOL: tool},
    }
    # The standard's own check: other installers can then read the file, too.
    Pylock.from_dict(document).validate()
    # resolve(): if the file is a link, the link stays and its target is written.
    write_whole(file.resolve(), tomli_w.dumps(document))


def _package_entry(wheel: LockedWheel) -> dict[str, Any]:
    """Return a wheel as an entry of ``packages`` in the lock; ``_wheel_of_entry`` reads it."""
    record: dict[str, Any] = {"path": f"wheelhouse/{wheel.file}"}
    # PEP 751 has no value for an unknown size, so the key is omitted.
    if wheel.size:
        record["size"] = wheel.size
    record["hashes"] = {"sha256": wheel.sha256}
    package: dict[str, Any] = {"name": wheel.name, "version": wheel.version}
    # A wheel that no index has is under ``archive``, by which read_pylock() recognises it.
    if wheel.url:
        package["archive"] = record
    else:
        package["wheels"] = [record]
    if wheel.index:
        package["tool"] = {_TOOL: {"index": wheel.index}}
    return package


def read_pylock(file: Path) -> LockFile:
    """Read a lock.

    Raises:
        VllmEnvError: the file is damaged or has another format.
    """
    try:
        document = read_toml(file)
        packages = Pylock.from_dict(document).packages
        tool = document["tool"][_TOOL]
        if tool["format"] != _FORMAT:
            raise VllmEnvError(
                f"The lock {file} has format {tool['format']}, not {_FORMAT}.", remedy=_UPGRADE
            )
        values = tool["inputs"]
        # TOML has only lists. A spec has tuples, and a list is never equal to a tuple.
        tuples = {k: tuple(v) for k, v in values.items() if isinstance(v, list)}
        inputs = Inputs(**(values | tuples))
        conda = tool.get("conda", {}).get(REMOTE_CHANNEL)
        layer = None
        if conda:
            layer = CondaLayer(REMOTE_CHANNEL, tuple(CondaPackage(**package) for package in conda))
        return LockFile(inputs, tuple(_wheel_of_entry(package) for package in packages), layer)
    except (ValueError, TypeError, KeyError, PylockValidationError) as error:
        raise VllmEnvError(f"The lock {file} is damaged: {error}.", remedy=_UPGRADE) from error


def _wheel_of_entry(package: Package) -> LockedWheel:
    """Return the one wheel that a lock of this tool has for a package.

    ``_package_entry`` writes the entry.

    Raises:
        ValueError: the entry has no path, so another tool has written it.
    """
    # An archive is a wheel that no index has.
    place = package.archive or next(iter(package.wheels or ()), None)
    # The standard allows entries that have only a URL.
    if place is None or not place.path:
        raise ValueError(f"{package.name} has no wheel with a path")
    file = place.path.rsplit("/", 1)[-1]
    return LockedWheel(
        name=str(package.name),
        version=str(package.version or parse_wheel_filename(file)[1]),
        file=file,
        sha256=place.hashes["sha256"],
        size=place.size or 0,
        index=str((package.tool or {}).get(_TOOL, {}).get("index", "")),
        # Not a URL yet: _with_files() in lock.py finds the file's place on this machine.
        url=place.path if package.archive else "",
    )
