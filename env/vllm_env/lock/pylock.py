"""A lock: its inputs and the exact files, read from and written to ``pylock.toml`` (PEP 751).

Wheels are named by file, as in a wheelhouse next to the lock, and by hash. They have no URL of a registry, so any mirror
may serve them. ``[tool.vllm-env]`` has what the standard does not cover: the inputs and the interpreter's conda packages.
Only packages of conda-forge are locked. The local channel cannot be: each machine makes it from its own interpreter.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from packaging.pylock import Package, Pylock, PylockValidationError
from packaging.utils import parse_wheel_filename

from vllm_env.base.errors import VllmEnvError
from vllm_env.base.filesystem import write_whole
from vllm_env.interpreter.layer import REMOTE, CondaLayer, CondaPackage

from .pins import PinnedVllm
from .spec import Spec, read_toml

PYTORCH = "pytorch"
"""The value of ``LockedWheel.index`` for a build that only PyTorch's own index has, such as ``torch==2.13.0+cpu``."""


@dataclass(frozen=True)
class LockedWheel:
    """One wheel.

    Attributes:
        name: normalised name.
        version: its version.
        file: file name.
        sha256: hexadecimal digest.
        size: bytes; 0 if unknown.
        index: ``pytorch``, or "" for the registries that pip is configured with.
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


@dataclass(frozen=True)
class Inputs:
    """The values that a lock was resolved from, as in ``Spec``; ``pin`` is a requirement without the pinned file's folder."""

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

    def drift(self, now: "Inputs") -> str:
        """Return how these inputs differ from ``now``, with both values; "" if they are equal."""
        pairs = (
            (f.name, getattr(self, f.name), getattr(now, f.name)) for f in dataclasses.fields(self)
        )
        return "; ".join(
            f"{name} was {_shown(old)} and is {_shown(new)}"
            for name, old, new in pairs
            if old != new
        )


def _shown(value: object) -> str:
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
        """Return the SHA-256 of the locked packages in hexadecimal. The places of the files do not count."""
        packages = [dataclasses.asdict(p) for p in self.conda.packages]
        wheels = sorted((w.name, w.version, w.sha256) for w in self.wheels)
        return hashlib.sha256(json.dumps([packages, wheels], sort_keys=True).encode()).hexdigest()

    @property
    def python(self) -> str:
        """Return the interpreter's full version, such as ``3.11.7``."""
        return self.conda.python

    @property
    def download_size(self) -> int:
        """Return the bytes of all wheels whose size is known."""
        return sum(wheel.size for wheel in self.wheels)

    @property
    def requirements(self) -> str:
        """Return the wheels as a requirements file with hashes, for uv and pip."""
        return "".join(f"{wheel.requirement}\n" for wheel in self.wheels)

    def versions(self) -> dict[str, str]:
        """Return the version of each locked distribution by its normalised name."""
        return {wheel.name: wheel.version for wheel in self.wheels}


_TOOL = "vllm-env"
_FORMAT = 1  # raise it when the tables of [tool.vllm-env] change
_WHEELHOUSE = "wheelhouse"
_UPGRADE = "Resolve again with --upgrade, or restore the file from git."


@dataclasses.dataclass(frozen=True)
class LockFile:
    """The content of a lock file; ``layer`` is the interpreter from conda-forge if that was locked, else None."""

    inputs: Inputs
    wheels: tuple[LockedWheel, ...]
    layer: CondaLayer | None


def write_pylock(lock: Lock, file: Path) -> None:
    """Write a lock; the file appears completely or not at all."""
    tool: dict[str, Any] = {"format": _FORMAT, "inputs": dataclasses.asdict(lock.inputs)}
    # A package of the local channel exists only on this machine, so it is not locked.
    if lock.conda.channel == REMOTE:
        tool["conda"] = {REMOTE: [dataclasses.asdict(package) for package in lock.conda.packages]}
    document = {
        "lock-version": "1.0",
        "created-by": "gen_vllm_env.sh --upgrade",
        "requires-python": f"=={lock.spec.python}.*",
        "packages": [
            _package(wheel) for wheel in sorted(lock.wheels, key=lambda wheel: wheel.name)
        ],
        "tool": {_TOOL: tool},
    }
    Pylock.from_dict(document).validate()
    # resolve(): if the file is a link, the link stays and its target is written.
    write_whole(file.resolve(), tomli_w.dumps(document))


def _package(wheel: LockedWheel) -> dict[str, Any]:
    place = {"path": f"{_WHEELHOUSE}/{wheel.file}", **({"size": wheel.size} if wheel.size else {})}
    record = place | {"hashes": {"sha256": wheel.sha256}}
    package: dict[str, Any] = {"name": wheel.name, "version": wheel.version}
    # A wheel that no index has is under ``archive``, by which read_pylock() recognises it.
    package |= {"archive": record} if wheel.url else {"wheels": [record]}
    return package | ({"tool": {_TOOL: {"index": wheel.index}}} if wheel.index else {})


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
        given: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in tool["inputs"].items()
        }
        inputs = Inputs(**given)
        conda = tool.get("conda", {}).get(REMOTE)
        layer = (
            CondaLayer(REMOTE, tuple(CondaPackage(**package) for package in conda))
            if conda
            else None
        )
        return LockFile(inputs, tuple(_wheel(package) for package in packages), layer)
    except (ValueError, TypeError, KeyError, PylockValidationError) as error:
        raise VllmEnvError(f"The lock {file} is damaged: {error}.", remedy=_UPGRADE) from error


def _wheel(package: Package) -> LockedWheel:
    """Return the one wheel that a lock of this tool has for a package."""
    places = [package.archive] if package.archive else [*(package.wheels or ())]
    place = places[0] if places else None
    if place is None or not place.path:
        raise ValueError(f"{package.name} has no wheel with a path")
    name = place.path.rsplit("/", 1)[-1]
    index = str((package.tool or {}).get(_TOOL, {}).get("index", ""))
    url = place.path if package.archive else ""
    version = str(package.version or parse_wheel_filename(name)[1])
    return LockedWheel(
        str(package.name), version, name, place.hashes["sha256"], place.size or 0, index, url
    )
