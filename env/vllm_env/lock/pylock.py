"""Reads and writes a lock as ``pylock.toml`` (PEP 751).

Wheels are named by file, as in a wheelhouse beside the lock, and by hash, not by a registry's URL, so that any mirror may
serve them. What the standard has no place for is in ``[tool.vllm-env]``: the inputs, and the interpreter for each
channel that packages can be locked of (conda-forge; the local channel is made by each machine from its own interpreter).
"""

import dataclasses
from pathlib import Path
from typing import Any

import tomli_w
from packaging.pylock import Package, Pylock, PylockValidationError
from packaging.utils import parse_wheel_filename

from vllm_env.base.errors import VllmEnvError
from vllm_env.base.filesystem import write_whole
from vllm_env.interpreter.layer import REMOTE, CondaLayer, CondaPackage

from .locked import Inputs, Lock, LockedWheel
from .spec import read_toml

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
