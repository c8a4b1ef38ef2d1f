"""The manifest ``vllm_env.json`` of a built model.

A built model is verified, reused and loaded by its manifest.
"""

import dataclasses
import datetime
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from vllm_env import __version__
from vllm_env.base.command import COMMAND
from vllm_env.base.errors import REBUILD_REMEDY, VllmEnvError
from vllm_env.base.filesystem import file_sha256
from vllm_env.base.machine import AMD64, this_platform
from vllm_env.layout.layout import EnvironmentRecord, Layout, Packed
from vllm_env.layout.layouts import LAYOUTS
from vllm_env.prefix.prefix import Prefix
from vllm_env.triton.elsewhere import SERVER_ORIGIN, ServerRecord, servers_of
from vllm_env.triton.root import STUB_NAME
from vllm_env.triton.stub import Stub
from vllm_env.verify.tree_rules import Expected

from .contents import check_unpacked, record_of

MANIFEST_NAME = "vllm_env.json"
CACHE_NAME = "vllm_cache"
"""The folder of vLLM's caches in the model's folder, which ``--warm`` fills."""
FOREIGN_REMEDY = f"Build it again with {COMMAND} here, or serve it on such a machine."
# Raise it when the fields change: the served model and published models depend on them.
FORMAT = 1
# The manifest records their versions. vllm_env.cdx.json has all of them.
_NAMED = ("torch", "numpy", "transformers", "setuptools", "triton")


@dataclass(frozen=True)
class VllmRecord:
    """The packed vLLM; ``commit`` is empty for a release."""

    version: str
    commit: str
    distribution: str
    origin: str


@dataclass(frozen=True)
class StubRecord:
    """The stub: its SHA-256, its size in bytes, its Python (``3.11``) and Triton (``24.10``).

    If its origin is ``server``, the model has no stub, and the server's own is used.
    """

    sha256: str
    size: int
    python: str
    release: str
    origin: str
    name: str = STUB_NAME

    @property
    def is_in_model(self) -> bool:
        """Return whether the model's folder has the stub."""
        return self.origin != SERVER_ORIGIN


@dataclass(frozen=True)
class Manifest:
    """The built files, their sources and their Triton.

    Attributes:
        key: content key of the published set.
        layout: name of the layout.
        vllm: the packed vLLM.
        python: the full version (``3.11.7``).
        versions: versions of the most important distributions.
        triton_release: the release that the model was built for.
        environment: the files of the environment, or its folder; config.pbtxt names the first one.
        stub: the stub.
        spec: the inputs of the lock.
        lock_digest: the lock's digest.
        left_out: names of the rules by which files were omitted.
        built_at: time of the build (ISO 8601, UTC).
        built_by: version of this tool.
        format: version of this document.
        adopted_from: absolute path of the official backend's model folder from which ``adopt`` made
            this model, or "".
        servers: the releases that serve the model, if the server's own stub is used.
    """

    key: str
    layout: str
    vllm: VllmRecord
    python: str
    versions: dict[str, str]
    triton_release: str
    environment: tuple[EnvironmentRecord, ...]
    stub: StubRecord
    spec: dict[str, Any]
    lock_digest: str
    left_out: tuple[str, ...]
    built_at: str
    built_by: str = f"vllm-env {__version__}"
    format: int = FORMAT
    adopted_from: str = ""
    servers: ServerRecord | None = None

    def document(self) -> dict[str, Any]:
        """Return the content of the file."""
        document = dataclasses.asdict(self)
        # The names of format 1.
        document["archive"], *document["parts"] = document.pop("environment")
        return document

    def to_json(self) -> str:
        """Return the manifest as JSON."""
        return json.dumps(self.document(), indent=2, sort_keys=True) + "\n"

    @property
    def platform(self) -> str:
        """Return the machines that serve the model, such as ``linux/amd64``."""
        # Builds of earlier versions were for x86-64 only.
        return str(self.spec.get("platform") or AMD64.name)

    @property
    def foreign(self) -> str:
        """Return a sentence if the model is for other machines than this one, or ""."""
        return _foreign(self.platform)

    def require_platform(self) -> None:
        """Raise a VllmEnvError if programs of the environment do not run on this machine."""
        if self.foreign:
            raise VllmEnvError(
                self.foreign,
                cause="The environment's Python would have to start here.",
                remedy=f"Do it on a machine for {self.platform}, or build it with --layout archive "
                "there, which `export` can read anywhere.",
            )

    @property
    def named(self) -> EnvironmentRecord:
        """Return the file or folder that config.pbtxt names."""
        return self.environment[0]

    def packed(self, model: Path) -> tuple[Layout, Packed]:
        """Return the layout and the environment in the model's folder."""
        # Parts are unpacked by the environment's own Python.
        if self.layout == "parts":
            self.require_platform()
        layout = LAYOUTS[self.layout]
        return layout, layout.load(model, self.environment)

    def is_whole(self, model: Path) -> bool:
        """Return whether the environment's files have the recorded sizes."""
        # A truncated file has another size. Hashing up to 4 GB would take many seconds. The layout
        # "directory" records no size for its folder.
        sizes = {model / record.name: record.size for record in self.environment}
        return all(
            file.is_dir() or (file.is_file() and file.stat().st_size == size)
            for file, size in sizes.items()
        )

    def expected(self) -> Expected:
        """Return the expected properties of the published environment."""
        # An environment has distributions that the manifest does not record, so these versions are
        # not complete.
        distribution = str(canonicalize_name(self.vllm.distribution))
        versions = {**self.versions, distribution: self.vllm.version}
        profile = str(self.spec.get("profile", "cpu"))
        return Expected(self.stub.python, self.stub.release, versions, profile=profile)


def describe_build(
    key: str, prefix: Prefix, stub: Stub, layout: Layout, packed: Packed
) -> Manifest:
    """Return the manifest of a build."""
    lock = prefix.lock
    pinned = lock.vllm
    versions = lock.versions()
    return Manifest(
        key=key,
        layout=layout.name,
        vllm=VllmRecord(
            # The lock has normalised names, the wheel of a pin may have another spelling.
            version=versions.get(str(canonicalize_name(pinned.name)), ""),
            commit=pinned.commit,
            distribution=pinned.name,
            origin=pinned.origin,
        ),
        python=lock.python,
        # A CPU environment has no triton, the GPU's kernel compiler.
        versions={name: versions[name] for name in _NAMED if name in versions},
        triton_release=stub.release,
        environment=packed.records,
        stub=StubRecord(stub.sha256, stub.size, stub.python, stub.release, stub.origin),
        spec=dataclasses.asdict(lock.inputs),
        lock_digest=lock.digest,
        left_out=prefix.left_out,
        servers=servers_of(stub.release) if stub.path is None else None,
        built_at=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )


def read_manifest(model: Path) -> Manifest | None:
    """Return the manifest of a model's folder; None if it has none.

    Raises:
        VllmEnvError: the manifest is damaged or has another format.
    """
    file = model / MANIFEST_NAME
    if not file.is_file():
        return None
    try:
        document = json.loads(file.read_text("utf-8"))
        if document.get("format") != FORMAT:
            raise VllmEnvError(
                f"{file} has format {document.get('format')}, not {FORMAT}.", remedy=REBUILD_REMEDY
            )
        document["vllm"] = VllmRecord(**document["vllm"])
        records = (document.pop("archive"), *document.pop("parts", ()))
        document["environment"] = tuple(EnvironmentRecord(**record) for record in records)
        document["stub"] = StubRecord(**document["stub"])
        if servers := document.get("servers"):
            document["servers"] = ServerRecord(**servers)
        # JSON has only lists.
        document["left_out"] = tuple(document["left_out"])
        # A layout that this version does not have raises a KeyError.
        LAYOUTS[document["layout"]]
        return Manifest(**document)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise VllmEnvError(f"{file} is damaged: {error}.", remedy=REBUILD_REMEDY) from error


def foreign(model: Path) -> str:
    """Return a sentence if a model's folder is for other machines than this one, or ""."""
    try:
        document = json.loads((model / MANIFEST_NAME).read_text("utf-8"))
        return _foreign(document["spec"]["platform"])
    # Manifests for x86-64 do not name it. A damaged one is reported when the model is loaded.
    except (OSError, ValueError, TypeError, KeyError):
        return _foreign(AMD64.name)


def _foreign(built_for: str) -> str:
    """Return a sentence if this machine is not of the platform ``built_for``, or ""."""
    here = this_platform().name
    if built_for == here:
        return ""
    return f"This model was built for {built_for}, and this machine is {here}."


def adopted_from(model: Path) -> str:
    """Return the folder from which a model was adopted, or an empty string."""
    try:
        manifest = read_manifest(model)
    except VllmEnvError:
        # The build that asks will replace the damaged manifest.
        return ""
    return manifest.adopted_from if manifest else ""


def check_files(model: Path, manifest: Manifest) -> None:
    """Raise a VllmEnvError if a file of a published model does not match the manifest."""
    records: list[EnvironmentRecord | StubRecord] = [*manifest.environment]
    stub = model / manifest.stub.name
    if manifest.stub.is_in_model:
        records.append(manifest.stub)
    elif stub.exists():
        raise VllmEnvError(
            f"{stub} is not of this build.",
            cause="The model was built to use the server's own stub, and Triton prefers this one.",
            remedy="Remove it.",
        )
    for record in records:
        file = model / record.name
        if file.is_dir():
            _check_folder(file, record, model / MANIFEST_NAME)
            continue
        if not file.is_file():
            raise VllmEnvError(
                f"{file} is missing.", cause="The manifest names it.", remedy=REBUILD_REMEDY
            )
        # The size first: it finds a truncated archive without reading 4 GB.
        if file.stat().st_size != record.size or file_sha256(file) != record.sha256:
            raise VllmEnvError(
                f"{file} does not match {model / MANIFEST_NAME}.",
                cause="It was changed or cut off.",
                remedy=REBUILD_REMEDY,
            )


def _check_folder(folder: Path, record: EnvironmentRecord | StubRecord, manifest: Path) -> None:
    """Check an unpacked environment against its record.

    Args:
        folder: the environment.
        record: its record in the manifest.
        manifest: the manifest's path, for the message.

    Raises:
        VllmEnvError: a file was added, changed or removed.
    """
    # A build of the layout "directory" records no digest: the user may edit the folder. `export`
    # records one.
    if not record.sha256 or record_of(folder, record.name) == record:
        return
    # If a wheel's file differs, this raises an error with its name.
    check_unpacked(folder, REBUILD_REMEDY)
    raise VllmEnvError(
        f"{folder} does not match {manifest}.",
        cause="A file that no wheel lists was added, changed or removed: bytecode, or a file of "
        "the interpreter.",
        remedy=REBUILD_REMEDY,
    )
