"""A lock: what it was resolved from and the exact files that it came to, read from and written to ``pylock.toml`` (PEP 751).

Wheels are named by file, as in a wheelhouse beside the lock, and by hash, not by a registry's URL, so that any mirror may
serve them. What the standard has no place for is in ``[tool.vllm-env]``: the inputs, and the interpreter for each
channel that packages can be locked of (conda-forge; the local channel is made by each machine from its own interpreter).
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
"""``LockedWheel.index`` of a build that only the PyTorch project's own index has, such as ``torch==2.13.0+cpu``."""


@dataclass(frozen=True)
class LockedWheel:
    """One wheel: normalised name, version, file name, SHA-256 and size in bytes (0 if unknown).

    ``index`` is ``pytorch`` or empty for the registries that pip is configured with; ``url`` is where a file lies that no
    index has, such as a pinned wheel.
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
        """The wheel as a line of a requirements file with its hash."""
        what = f"{self.name} @ {self.url}" if self.url else f"{self.name}=={self.version}"
        return f"{what} --hash=sha256:{self.sha256}"


@dataclass(frozen=True)
class Inputs:
    """What a lock was resolved from, as in ``Spec``; ``pin`` is the pinned vLLM's requirement, a file's without its folder."""

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
        """Return what differs from other inputs, with both values, or nothing."""
        pairs = ((f.name, getattr(self, f.name), getattr(now, f.name)) for f in dataclasses.fields(self))
        return "; ".join(f"{name} was {_shown(old)} and is {_shown(new)}" for name, old, new in pairs if old != new)


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
        """SHA-256 of what is locked, in hexadecimal; where the files come from does not count."""
        packages = [dataclasses.asdict(p) for p in self.conda.packages]
        wheels = sorted((w.name, w.version, w.sha256) for w in self.wheels)
        return hashlib.sha256(json.dumps([packages, wheels], sort_keys=True).encode()).hexdigest()

    @property
    def python(self) -> str:
        """The interpreter's full version, such as ``3.11.7``."""
        return self.conda.python

    @property
    def download_size(self) -> int:
        """Bytes of all wheels whose size is known."""
        return sum(wheel.size for wheel in self.wheels)

    @property
    def requirements(self) -> str:
        """The wheels as a requirements file with hashes, which uv and pip read."""
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
    """What a lock file holds; ``layer`` is the interpreter of conda-forge, if it was locked."""

    inputs: Inputs
    wheels: tuple[LockedWheel, ...]
    layer: CondaLayer | None


def write_pylock(lock: Lock, file: Path) -> None:
    """Write a lock; the file appears whole or not at all."""
    tool: dict[str, Any] = {"format": _FORMAT, "inputs": dataclasses.asdict(lock.inputs)}
    if lock.conda.channel == REMOTE:
        tool["conda"] = {REMOTE: [dataclasses.asdict(package) for package in lock.conda.packages]}
    document = {
        "lock-version": "1.0",
        "created-by": "gen_vllm_env.sh --upgrade",
        "requires-python": f"=={lock.spec.python}.*",
        "packages": [_package(wheel) for wheel in sorted(lock.wheels, key=lambda wheel: wheel.name)],
        "tool": {_TOOL: tool},
    }
    Pylock.from_dict(document).validate()
    write_whole(file.resolve(), tomli_w.dumps(document))


def _package(wheel: LockedWheel) -> dict[str, Any]:
    place = {"path": f"{_WHEELHOUSE}/{wheel.file}", **({"size": wheel.size} if wheel.size else {})}
    record = place | {"hashes": {"sha256": wheel.sha256}}
    package: dict[str, Any] = {"name": wheel.name, "version": wheel.version}
    package |= {"archive": record} if wheel.url else {"wheels": [record]}
    return package | ({"tool": {_TOOL: {"index": wheel.index}}} if wheel.index else {})


def read_pylock(file: Path) -> LockFile:
    """Read a lock; VllmEnvError if the file is damaged, or of another format."""
    try:
        document = read_toml(file)
        packages = Pylock.from_dict(document).packages
        tool = document["tool"][_TOOL]
        if tool["format"] != _FORMAT:
            raise VllmEnvError(f"The lock {file} has format {tool['format']}, not {_FORMAT}.", remedy=_UPGRADE)
        given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in tool["inputs"].items()}
        inputs = Inputs(**given)
        conda = tool.get("conda", {}).get(REMOTE)
        layer = CondaLayer(REMOTE, tuple(CondaPackage(**package) for package in conda)) if conda else None
        return LockFile(inputs, tuple(_wheel(package) for package in packages), layer)
    except (ValueError, TypeError, KeyError, PylockValidationError) as error:
        raise VllmEnvError(f"The lock {file} is damaged: {error}.", remedy=_UPGRADE) from error


def _wheel(package: Package) -> LockedWheel:
    """Return the one wheel of a package that this tool has locked."""
    places = [package.archive] if package.archive else [*(package.wheels or ())]
    place = places[0] if places else None
    if place is None or not place.path:
        raise ValueError(f"{package.name} has no wheel with a path")
    name = place.path.rsplit("/", 1)[-1]
    index = str((package.tool or {}).get(_TOOL, {}).get("index", ""))
    url = place.path if package.archive else ""
    version = str(package.version or parse_wheel_filename(name)[1])
    return LockedWheel(str(package.name), version, name, place.hashes["sha256"], place.size or 0, index, url)
