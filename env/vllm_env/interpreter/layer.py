"""Solve and install the conda layer of an environment: the interpreter and its conda packages.

The packages come from conda-forge if it answers. Otherwise a local channel has one package, made
from an interpreter of this machine. The same code installs both, with py-rattler.
"""

import dataclasses
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_env.base import report
from vllm_env.base.errors import CommandError, VllmEnvError
from vllm_env.base.filesystem import file_sha256, put_in_place, write_whole
from vllm_env.base.machine import AMD64, PLATFORMS, Platform, this_platform
from vllm_env.base.network import NetworkError
from vllm_env.base.process import run
from vllm_env.base.workspace import Workspace

from .find import find_interpreter
from .package import LOCAL_BUILD, make_package

LOCAL_CHANNEL = "local"
REMOTE_CHANNEL = "conda-forge"
# The worker runs in this folder: it finds this package, and no module of the user's folder.
_PACKAGES = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class CondaPackage:
    """One exact conda package; ``sha256`` is the digest of its file."""

    name: str
    version: str
    build: str
    subdir: str
    file_name: str
    sha256: str


@dataclass(frozen=True)
class CondaLayer:
    """The packages of the conda layer, and their channel: ``conda-forge`` or ``local``."""

    channel: str
    packages: tuple[CondaPackage, ...]

    @property
    def interpreter(self) -> CondaPackage:
        """Return the package of the interpreter."""
        return next(package for package in self.packages if package.name == "python")

    @property
    def python(self) -> str:
        """Return the interpreter's full version, such as ``3.11.7``."""
        return self.interpreter.version

    @property
    def minor(self) -> str:
        """Return the interpreter's version without its last number, such as ``3.11``."""
        return self.python.rpartition(".")[0]

    def __str__(self) -> str:
        return f"{self.python} {self.interpreter.build} from {self.channel}"


def remote_url() -> str:
    """Return the URL of conda-forge, or of the mirror in ``VLLM_ENV_CONDA_CHANNEL``."""
    return os.environ.get("VLLM_ENV_CONDA_CHANNEL") or "https://conda.anaconda.org/conda-forge"


def choose_layer(
    workspace: Workspace,
    python: str,
    recorded: CondaLayer | None = None,
    *,
    upgrade: bool = False,
    target: Platform | None = None,
) -> CondaLayer:
    """Return the layer for a Python version (``3.11``) that a machine of ``target`` installs.

    The layer recorded in the lock is preferred if it is available, then the one in the wheelhouse.
    Otherwise conda-forge's is taken if it answers, else one from an interpreter of this machine.
    This choice is remembered until ``upgrade``, so that a second build is the same.

    By default the target is this machine. For another kind of machine, the layer is empty without
    conda-forge: only such a machine can make a package from its interpreter.

    Raises:
        VllmEnvError: no channel has the Python version.
    """
    here = this_platform()
    target = target or here
    # 1) The layer of the lock.
    if recorded and is_available(workspace, recorded):
        return recorded
    # 2) The wheelhouse's. copy_layer() has put it there, perhaps on another machine. Then this
    # machine needs no interpreter.
    wheelhouse = workspace.network.wheelhouse
    if wheelhouse:
        from_wheelhouse = _read_layer(wheelhouse.absolute() / "conda" / _file_name(python, target))
        if from_wheelhouse:
            return from_wheelhouse
    # 3) The choice of an earlier build, if it was conda-forge. If it was this machine, the layer
    # is taken from its interpreter again (step 4).
    memory = workspace.cache.path("conda", _file_name(python, target))
    choice = None if upgrade else _read_layer(memory)
    if choice and choice.channel == REMOTE_CHANNEL and is_available(workspace, choice):
        return choice
    # 4) A new choice. A channel that answers only now does not change an earlier choice.
    layer = None
    if not choice and workspace.network.answers(remote_url()):
        layer = _remote_layer(workspace, python, target)
    if not layer and target != here:
        return CondaLayer(LOCAL_CHANNEL, ())
    layer = layer or local_layer(workspace, python)
    # Offline, conda-forge was no choice. A later build with a network must still ask it.
    if not workspace.network.offline:
        write_whole(memory, json.dumps(dataclasses.asdict(layer)))
    return layer


def _file_name(python: str, target: Platform) -> str:
    """Return the name of the file that records the layer for a Python version and a machine."""
    # Platforms may share a folder. The records for x86-64 are older than the other platforms.
    suffix = "" if target == AMD64 else f"-{target.short}"
    return f"layer-{python}{suffix}.json"


def _read_layer(file: Path) -> CondaLayer | None:
    """Return the layer that a file records, or None if there is no such file."""
    if not file.is_file():
        return None
    document = json.loads(file.read_text("utf-8"))
    packages = tuple(CondaPackage(**package) for package in document["packages"])
    return CondaLayer(document["channel"], packages)


def _remote_layer(workspace: Workspace, python: str, target: Platform) -> CondaLayer | None:
    """Return conda-forge's newest layer for a Python version; None if it cannot be reached.

    Raises:
        VllmEnvError: conda-forge answers, and has no such Python.
    """
    # The C++ library must be at least as new as the one that the stub needs: it hides the system's.
    specs = [f"python {python}.*", "libstdcxx"]
    job = _package_job(workspace, "solve", remote_url(), specs, target)
    try:
        packages = _run_worker(workspace, job, f"resolve {', '.join(specs)} from conda-forge")
    except NetworkError as error:
        # A proxy may accept the connection and refuse the request.
        report.note(f"{error.what} {error.cause} This machine's Python is taken")
        return None
    except CommandError as error:
        raise VllmEnvError(
            f"conda-forge has no Python {python} that can be installed here.",
            cause=error.tail,
            remedy="Pick another with --python.",
        ) from error
    return CondaLayer(REMOTE_CHANNEL, tuple(CondaPackage(**package) for package in packages))


def local_layer(workspace: Workspace, python: str) -> CondaLayer:
    """Return the layer made from this machine's interpreter of version ``python`` (``3.11``).

    Raises:
        VllmEnvError: the machine has no such interpreter.
    """
    version = find_interpreter(python).version
    file = (
        _channel_folder(workspace, LOCAL_CHANNEL)
        / this_platform().conda
        / f"python-{version}-{LOCAL_BUILD}.conda"
    )
    if not file.is_file():
        make_local_channel(workspace, python)
    digest = file_sha256(file)
    subdir = this_platform().conda
    package = CondaPackage("python", version, LOCAL_BUILD, subdir, file.name, digest)
    return CondaLayer(LOCAL_CHANNEL, (package,))


def is_available(workspace: Workspace, layer: CondaLayer) -> bool:
    """Return whether the wheelhouse, the cache or a channel that answers has a layer."""
    if any(_holds(channel, layer) for channel in _channels(workspace, layer)):
        return True
    return layer.channel == REMOTE_CHANNEL and workspace.network.answers(remote_url())


def make_local_channel(workspace: Workspace, python: str) -> None:
    """Make the local channel again, with a new package for ``python`` (``3.11``)."""
    channel = _channel_folder(workspace, LOCAL_CHANNEL)
    interpreter = find_interpreter(python)
    with workspace.cache.staging() as staging:
        new = staging / "channel"
        subdir = this_platform().conda
        make_package(interpreter, new / subdir, staging)
        # Every channel has this folder.
        (new / "noarch").mkdir()
        # Keep the packages of other Python versions.
        for file in channel.glob(f"{subdir}/python-*.conda"):
            target = new / subdir / file.name
            if not target.exists():
                os.link(file, target)
        _index(workspace, new)
        put_in_place(new, channel)


def install_layer(workspace: Workspace, layer: CondaLayer, prefix: Path) -> None:
    """Install the packages of a layer into a new prefix.

    Raises:
        VllmEnvError: neither the wheelhouse nor the channel has exactly these packages.
    """
    channels = _channels(workspace, layer)
    channel = next((channel for channel in channels if _holds(channel, layer)), None)
    if channel is None:
        # The cache's.
        channel = channels[-1]
        _fill(workspace, layer, channel)
    specs = [f"{package.name} =={package.version} {package.build}" for package in layer.packages]
    job = _package_job(workspace, "install", channel.as_uri(), specs, this_platform())
    job["prefix"] = str(prefix)
    job["expected"] = {package.file_name: package.sha256 for package in layer.packages}
    _run_worker(workspace, job, "install the conda packages of the lock")


def copy_layer(workspace: Workspace, layer: CondaLayer, folder: Path) -> None:
    """Make ``folder/conda`` a conda channel with a layer's packages, and record the layer there.

    Raises:
        VllmEnvError: a package cannot be fetched, or its digest differs.
    """
    channel = folder.absolute() / "conda"
    if not _holds(channel, layer):
        _fill(workspace, layer, channel)
    target = next(p for p in PLATFORMS.values() if p.conda == layer.interpreter.subdir)
    write_whole(channel / _file_name(layer.minor, target), json.dumps(dataclasses.asdict(layer)))


def _fill(workspace: Workspace, layer: CondaLayer, channel: Path) -> None:
    """Put the packages of a layer into the folder ``channel``, and index it.

    They come from conda-forge, or are made from this machine's interpreter.
    """
    own = _channel_folder(workspace, LOCAL_CHANNEL)
    is_local = layer.channel == LOCAL_CHANNEL
    if is_local and not _holds(own, layer):
        make_local_channel(workspace, layer.minor)
    if channel == own:
        return
    # Copying from a folder is a download, too: its URL begins with file:.
    source = own.as_uri() if is_local else remote_url()
    for package in layer.packages:
        name = f"{package.subdir}/{package.file_name}"
        workspace.network.download(f"{source}/{name}", package.sha256, channel / name)
    (channel / "noarch").mkdir(exist_ok=True)
    _index(workspace, channel)


def _channels(workspace: Workspace, layer: CondaLayer) -> list[Path]:
    """Return the folders that may have the packages of a layer; the cache's is the last."""
    wheelhouse = workspace.network.wheelhouse
    own = _channel_folder(workspace, layer.channel)
    return [wheelhouse.absolute() / "conda", own] if wheelhouse else [own]


def _holds(channel: Path, layer: CondaLayer) -> bool:
    """Return whether the folder of a channel has a layer's packages, with the right digests."""
    for package in layer.packages:
        file = channel / package.subdir / package.file_name
        if not file.is_file() or file_sha256(file) != package.sha256:
            return False
    return True


def _index(workspace: Workspace, channel: Path) -> None:
    """Write the list of its packages into the folder of a channel."""
    job = {"kind": "index", "channel": str(channel)}
    _run_worker(workspace, job, "index the local conda channel")


def _package_job(
    workspace: Workspace, kind: str, channel: str, specs: list[str], target: Platform
) -> dict[str, Any]:
    """Return a job of rattler_worker.py that finds or installs packages.

    Args:
        workspace: the cache.
        kind: ``solve`` or ``install``.
        channel: the channel's URL.
        specs: the packages, as conda writes them (``python 3.11.*``).
        target: the machine that installs them.
    """
    return {
        "kind": kind,
        "channel_url": channel,
        "specs": specs,
        "platform": target.conda,
        "cache": str(workspace.cache.path("conda")),
    }


def _run_worker(workspace: Workspace, job: dict[str, Any], what: str) -> Any:
    """Run a job of rattler_worker.py, and return its answer; ``what`` is its purpose, for errors.

    Raises:
        CommandError: the job failed.
        NetworkError: the channel cannot be reached.
    """
    command = [sys.executable, "-m", "vllm_env.interpreter.rattler_worker", json.dumps(job)]
    variables = {"PYTHONPATH": str(_PACKAGES)}
    # Only this job may use the network; the others read folders.
    if job["kind"] == "solve" and not job["channel_url"].startswith("file:"):
        output = workspace.network.program(command, what, env=variables, cwd=_PACKAGES)
    else:
        output = run(command, what=what, env=variables, cwd=_PACKAGES)
    return json.loads(output.splitlines()[-1])


def _channel_folder(workspace: Workspace, channel: str) -> Path:
    return workspace.cache.path("conda", "channel" if channel == LOCAL_CHANNEL else channel)
