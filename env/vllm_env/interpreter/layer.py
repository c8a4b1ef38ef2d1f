"""The conda layer of an environment: the interpreter and what belongs to it, solved and installed by py-rattler.

From conda-forge where it answers, else from a local channel with one package that is made from an interpreter of this
machine. The same code solves and installs both.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_env.base import cache
from vllm_env.base.errors import CommandError, VllmEnvError
from vllm_env.base.process import run

from .local import BUILD, find_interpreter, make_package

if TYPE_CHECKING:
    from collections.abc import Sequence

LOCAL = "local"
_REMOTE = "conda-forge"
_CONNECT_TIMEOUT = 3.0  # s; a machine without access must not make a person wait


@dataclass(frozen=True)
class CondaPackage:
    """One exact conda package; ``sha256`` is that of its file."""

    name: str
    version: str
    build: str
    subdir: str
    file_name: str
    sha256: str


@dataclass(frozen=True)
class CondaLayer:
    """The packages of the conda layer and the channel that has them (``conda-forge`` or ``local``)."""

    channel: str
    packages: tuple[CondaPackage, ...]


def remote_url() -> str:
    """Return the address of conda-forge or of the mirror that ``VLLM_ENV_CONDA_CHANNEL`` names."""
    return os.environ.get("VLLM_ENV_CONDA_CHANNEL") or "https://conda.anaconda.org/conda-forge"


def remote_answers() -> bool:
    """Tell within 3 s whether the conda channel's host can be connected to."""
    parts = urllib.parse.urlsplit(remote_url())
    if parts.scheme == "file":
        return Path(parts.path).is_dir()
    proxy = os.environ.get("https_proxy") or os.environ.get("HTTPS_PROXY")
    if proxy:
        parts = urllib.parse.urlsplit(proxy)
    try:
        socket.create_connection((parts.hostname, parts.port or 443), timeout=_CONNECT_TIMEOUT).close()
    except OSError:
        return False
    return True


def solve_layer(python: str, root: Path, *, offline: bool) -> CondaLayer:
    """Resolve the conda layer for a Python version (``3.11``).

    Raises:
        VllmEnvError: neither channel has such a Python.
    """
    if not offline and remote_answers():
        try:
            packages = _solve(_REMOTE, [f"python {python}.*", "libstdcxx"], root)
        except CommandError as error:
            raise VllmEnvError(
                f"conda-forge has no Python {python} that can be installed here.",
                cause=error.tail,
                remedy="Pick another with --python.",
            ) from error
        return CondaLayer(_REMOTE, packages)
    make_local_channel(python, root)
    return CondaLayer(LOCAL, _solve(LOCAL, [f"python {python}.*"], root))


def local_layer(python: str, root: Path) -> CondaLayer | None:
    """Return the layer that this machine's interpreter gives, or None if it has none to pack."""
    try:
        interpreter = find_interpreter(python)
    except VllmEnvError:
        return None
    file = _channel_folder(root) / "linux-64" / f"python-{interpreter.version}-{BUILD}.conda"
    if not file.is_file():
        make_local_channel(python, root)
    package = CondaPackage("python", interpreter.version, BUILD, "linux-64", file.name, cache.file_sha256(file))
    return CondaLayer(LOCAL, (package,))


def is_cached(layer: CondaLayer, root: Path) -> bool:
    """Tell whether all packages of a layer lie unpacked in the cache."""
    folder = root / "conda" / "packages"
    return all((folder / p.file_name.removesuffix(".conda").removesuffix(".tar.bz2")).is_dir() for p in layer.packages)


def make_local_channel(python: str, root: Path) -> None:
    """Make the local channel anew, with a package of this machine's interpreter."""
    channel = _channel_folder(root)
    interpreter = find_interpreter(python)
    with cache.staging(root) as staging:
        new = staging / "channel"
        make_package(interpreter, new / "linux-64", staging)
        (new / "noarch").mkdir()
        _work({"kind": "index", "channel": str(new)}, "index the local conda channel", root)
        # packages of other Python versions stay; two builds at once write the same bytes
        for file in sorted(channel.glob("linux-64/python-*.conda")):
            if not (new / "linux-64" / file.name).exists():
                os.link(file, new / "linux-64" / file.name)
        _work({"kind": "index", "channel": str(new)}, "index the local conda channel", root)
        cache.remove_tree(channel)
        channel.parent.mkdir(parents=True, exist_ok=True)
        new.rename(channel)


def install_layer(layer: CondaLayer, prefix: Path, root: Path, wheelhouse: Path | None = None) -> None:
    """Install the exact packages of a layer into a new prefix, from the wheelhouse if that has them.

    Raises:
        VllmEnvError: the channel does not have these very packages.
    """
    packed = in_wheelhouse(layer, wheelhouse)
    if layer.channel == LOCAL and not packed and not _holds(_channel_folder(root), layer):
        python = next(p.version for p in layer.packages if p.name == "python")
        make_local_channel(".".join(python.split(".")[:2]), root)
    specs = [f"{p.name} =={p.version} {p.build}" for p in layer.packages]
    job = _job("install", layer.channel, specs, root)
    job |= {"prefix": str(prefix), "expected": {p.file_name: p.sha256 for p in layer.packages}}
    if packed:
        job["channel_url"] = packed.as_uri()
    _work(job, "install the conda packages of the lock", root)


def in_wheelhouse(layer: CondaLayer, wheelhouse: Path | None) -> Path | None:
    """Return the conda channel of a wheelhouse if it holds all packages of a layer."""
    channel = wheelhouse.absolute() / "conda" if wheelhouse else None
    return channel if channel and _holds(channel, layer) else None


def copy_layer(layer: CondaLayer, wheelhouse: Path, root: Path) -> None:
    """Put the packages of a layer into a wheelhouse, as a conda channel.

    Raises:
        VllmEnvError: a package cannot be fetched, or is not the lock's.
    """
    if in_wheelhouse(layer, wheelhouse):
        return
    if layer.channel == LOCAL and not _holds(_channel_folder(root), layer):
        make_local_channel(".".join(layer.packages[0].version.split(".")[:2]), root)
    source = _channel_folder(root).as_uri() if layer.channel == LOCAL else remote_url()
    channel = wheelhouse.absolute() / "conda"
    for package in layer.packages:
        target = channel / package.subdir / package.file_name
        target.parent.mkdir(parents=True, exist_ok=True)
        _fetch(f"{source}/{package.subdir}/{package.file_name}", package.sha256, target)
    (channel / "noarch").mkdir(exist_ok=True)
    _work({"kind": "index", "channel": str(channel)}, "index the conda channel of the wheelhouse", root)


def _fetch(url: str, sha256: str, target: Path) -> None:
    temporary = target.with_name(f".{target.name}.new")
    try:
        with urllib.request.urlopen(url) as source, temporary.open("wb") as sink:  # noqa: S310 - the channel's address
            shutil.copyfileobj(source, sink)
        if cache.file_sha256(temporary) != sha256:
            raise VllmEnvError(
                f"{url} is not the lock's: its SHA-256 is another.", remedy="Fetch it again, or --upgrade."
            )
        temporary.replace(target)
    except OSError as error:
        raise VllmEnvError(f"{url} cannot be fetched: {error}.", remedy="Check that the channel answers.") from error
    finally:
        temporary.unlink(missing_ok=True)


def _holds(channel: Path, layer: CondaLayer) -> bool:
    files = [(channel / p.subdir / p.file_name, p.sha256) for p in layer.packages]
    return all(file.is_file() and cache.file_sha256(file) == sha256 for file, sha256 in files)


def _solve(channel: str, specs: Sequence[str], root: Path) -> tuple[CondaPackage, ...]:
    records = _work(_job("solve", channel, specs, root), f"resolve {', '.join(specs)} from {channel}", root)
    return tuple(CondaPackage(**record) for record in records)


def _job(kind: str, channel: str, specs: Sequence[str], root: Path) -> dict[str, Any]:
    url = _channel_folder(root).as_uri() if channel == LOCAL else remote_url()
    return {"kind": kind, "channel_url": url, "specs": list(specs), "cache": str(root / "conda")}


def _work(job: dict[str, Any], what: str, root: Path) -> Any:
    with cache.staging(root) as folder:
        answer = folder / "answer.json"
        (folder / "job.json").write_text(json.dumps(job | {"answer": str(answer)}), "utf-8")
        package_parent = str(Path(__file__).resolve().parents[2])
        run(
            [sys.executable, "-m", "vllm_env.interpreter.rattler_worker", folder / "job.json"],
            what=what,
            env={"PYTHONPATH": package_parent},
        )
        return json.loads(answer.read_text("utf-8"))


def _channel_folder(root: Path) -> Path:
    return root / "conda" / "channel"
