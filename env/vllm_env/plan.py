"""The plan of a build, known before anything slow starts."""

import dataclasses
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from vllm_env.base import report
from vllm_env.base.cache import key_of
from vllm_env.base.errors import UsageError, VllmEnvError
from vllm_env.base.filesystem import require_space
from vllm_env.base.network import require_loopback
from vllm_env.base.sources import masked
from vllm_env.base.workspace import CHECKOUT, PLACE, Workspace
from vllm_env.layout import LAYOUTS
from vllm_env.layout.layout import Layout
from vllm_env.layout.unpacked import require_places
from vllm_env.lock.lock import LockOptions, make_lock
from vllm_env.lock.pins import NotKnownError
from vllm_env.lock.pylock import Lock
from vllm_env.lock.spec import Overrides, Spec, load_spec, only_profile
from vllm_env.model.files import check_model_folder
from vllm_env.model.manifest import Manifest, read_manifest
from vllm_env.prefix.prefix import prefix_key
from vllm_env.publish.adopt import Adoption
from vllm_env.publish.model_config import changes_count
from vllm_env.publish.publish import check_writable
from vllm_env.serve.proof import Subject, recall
from vllm_env.triton.elsewhere import image_of, triton_elsewhere
from vllm_env.triton.provision import provision, to_be_provisioned
from vllm_env.triton.root import CONTAINER_ROOT, TritonRoot, is_plain, open_root
from vllm_env.triton.stub import StubMode, StubPlan, plan_stub
from vllm_env.triton.stub_source import StubOptions
from vllm_env.verify.verify import check_plan

PROVISIONED = PLACE / ".triton"
"""The folder of the CPU Triton that is made for machines without a Triton."""
TEMPLATE = CHECKOUT / "model_repository" / "vllm"
"""The model's code and configuration, from which another repository or model is completed."""
UNKNOWN = "known after the build"
"""A dry run prints this for a value that only a build can know."""
# Triton's pb_env.cc has this folder in its code. TMPDIR does not change it.
TMP = "/tmp"  # noqa: S108


@dataclass(frozen=True)
class BuildRequest:
    """The request of the command line.

    Attributes:
        smoke: whether to serve the result if this machine can.
        smoke_again: whether the user has asked for the smoke run (``--smoke-run``).
        smoke_model: the model of the smoke run if it is not the stand-in.
        count: the instances to write into ``config.pbtxt``; 0 leaves it as it is.
    """

    profile: str | None = None
    overrides: Overrides = field(default_factory=Overrides)
    spec_file: Path | None = None
    triton_root: Path | None = None
    stub: StubMode = "auto"
    stub_options: StubOptions = field(default_factory=StubOptions)
    layout: Layout = LAYOUTS["parts"]
    repository: Path = PLACE / "model_repository"
    model: str = "vllm"
    lock: LockOptions = field(default_factory=LockOptions)
    keep: tuple[str, ...] = ()
    smoke: bool = True
    smoke_again: bool = False
    smoke_model: str = ""
    warm: bool = False
    count: int = 0
    template: Path = TEMPLATE
    adoption: Adoption | None = None

    @property
    def model_folder(self) -> Path:
        """Return the folder that the build publishes."""
        return self.repository / self.model


@dataclass(frozen=True)
class Plan:
    """The plan of a build.

    A dry run cannot know the lock of a vLLM that has no wheel yet, nor what depends on the lock.

    Attributes:
        spec: the profile with the command line's changes.
        triton: the Triton that will serve the model.
        lock: the exact files; None if they are not known.
        stub: where the stub comes from.
        key: content key of the set of files to publish; empty if it is not known.
        unserved: why this machine cannot serve the model; empty if it can, or need not.
        forecast: how a build would get the wheel that the lock depends on; empty with a lock.
    """

    spec: Spec
    triton: TritonRoot
    lock: Lock | None
    stub: StubPlan
    key: str
    unserved: str = ""
    forecast: str = ""


def standing(model: Path, key: str) -> Manifest | None:
    """Return the manifest of the published model if it has this content key, else None."""
    try:
        manifest = read_manifest(model)
    # It is damaged, or of another version of this tool. The message says "Build it again".
    except VllmEnvError:
        return None
    return manifest if manifest and manifest.key == key else None


def has_gpu() -> bool:
    """Return whether this machine has an NVIDIA GPU that programs can use."""
    devices = Path("/dev")
    if (devices / "nvidiactl").exists():
        return True
    # An image may have nvidia-smi without a GPU.
    return shutil.which("nvidia-smi") is not None and any(devices.glob("nvidia[0-9]*"))


def installed_triton() -> Path | None:
    """Return the root of the container's Triton, else of the provisioned one, else None."""
    for root in (CONTAINER_ROOT, PROVISIONED):
        if (root / "bin" / "tritonserver").is_file():
            return root
    return None


def default_profile(root: Path | None) -> str:
    """Return ``cuda`` in a Triton container with a GPU, else ``cpu``."""
    # Another Triton here is the provisioned one, which has no support for GPUs.
    return "cuda" if root == CONTAINER_ROOT and has_gpu() else "cpu"


def find_triton(workspace: Workspace, root: Path | None, release: str = "") -> TritonRoot:
    """Open the named Triton root, else the container's, else the provisioned one.

    The last one is made if it is missing. If a ``release`` is given, it is not: the Triton is then
    elsewhere, unless the named one or the container's is of this release.

    Raises:
        UsageError: the named root or the container's is of another release.
    """
    existing = root or installed_triton()
    if _is_elsewhere(existing, release):
        return triton_elsewhere(release)
    if existing:
        if release:
            _require_release(existing, release)
        return open_root(existing)
    # The content of the pinned wheel is known, so a dry run needs no file of it.
    if workspace.dry_run:
        return to_be_provisioned(workspace, PROVISIONED)
    with report.stage("triton"):
        provision(workspace, PROVISIONED)
        triton = open_root(PROVISIONED)
        report.step(f"a CPU Triton {triton.release} in {PROVISIONED}")
    return triton


def _is_elsewhere(root: Path | None, release: str) -> bool:
    """Return whether the Triton of a given release, if any, is not the one on this machine."""
    return bool(release) and root in (None, PROVISIONED)


def _require_release(root: Path, release: str) -> None:
    """Raise a UsageError if the Triton in a root is of another release."""
    here = open_root(root).release
    if here != release:
        raise UsageError(
            f"--triton-release {release}: the Triton in {root} is of release {here}.",
            cause="A stub works with one release only, and a build here takes this Triton's.",
            remedy=f"Build where no Triton is installed, or in the container {image_of(release)}. "
            f"Without the option, the model is built for {here}.",
        )


def make_plan(workspace: Workspace, request: BuildRequest) -> Plan:
    """Read the spec, resolve the lock and choose the stub.

    A build first makes missing inputs: a Triton, a wheel of the pinned vLLM and the lock's file.

    Raises:
        VllmEnvError: something is wrong that would let the build fail, perhaps minutes later.
    """
    # 1) Where the set goes, and the Triton that will serve it
    check_writable(request.repository, request.model)
    check_model_folder(request.model_folder)
    changes_count(request.model_folder, request.count)
    # A spec that --save wrote has only one profile: the user need not name it.
    alone = only_profile(request.spec_file) if request.spec_file else None
    root = request.triton_root or installed_triton()
    profile = request.profile or alone or default_profile(root)
    spec = load_spec(profile, request.overrides, request.spec_file)
    # Not served there: a GPU on this machine would not help.
    if _is_elsewhere(root, spec.triton_release):
        unserved = _check_elsewhere(request, triton_elsewhere(spec.triton_release))
    else:
        unserved = _check_gpu(request, profile)
    triton = find_triton(workspace, request.triton_root, spec.triton_release)
    if unserved:
        # The checks below are about serving here.
        request = dataclasses.replace(request, smoke=False)
    _check_paths(workspace, request, triton)
    # 2) What it contains
    if not _is_proved(workspace, request, triton):
        check_server(request, profile)
    # A stub for cuda shares GPU memory with the server.
    options = dataclasses.replace(request.stub_options, gpu=spec.profile == "cuda")
    # Checked before the lock, which may take minutes to resolve.
    if request.stub == "prebuilt" or triton.is_elsewhere:
        plan_stub(workspace, triton, spec.python, request.stub, options)
    # 3) The exact files
    with report.stage("lock"):
        try:
            lock = make_lock(workspace, spec, triton.rules, request.lock)
        except NotKnownError as unknown:
            report.note(f"{unknown.what} The lock is known after the build.")
            stub = plan_stub(workspace, triton, spec.python, request.stub, options)
            forecast = unknown.forecast
            return Plan(spec, triton, None, stub, key="", unserved=unserved, forecast=forecast)
        report.step(f"{masked(spec.pin.value)}: {len(lock.wheels)} wheels, Python {lock.python}")
    stub = plan_stub(workspace, triton, lock.python, request.stub, options)
    is_compiled = not stub.prebuilt and not triton.is_elsewhere
    # Those of the environment are for all builds.
    if not is_compiled and request.stub_options != StubOptions.of():
        report.note("--triton-git-url, --boost-url and --jobs have no effect: no stub is compiled")
    for note in check_plan(lock, triton):
        report.note(note)
    packed = request.layout.key(prefix_key(lock, request.keep))
    # Before Triton is installed, its stub has no digest yet.
    has_identity = triton.is_there or triton.is_elsewhere
    key = key_of(packed, stub.identity, request.layout.name) if has_identity else ""
    return Plan(spec, triton, lock, stub, key, unserved)


def make_dry_plan(workspace: Workspace, request: BuildRequest) -> Plan:
    """Return the plan of a build; write only into a temporary folder."""
    with workspace.for_dry_run() as scratch:
        return make_plan(scratch, request)


def _check_paths(workspace: Workspace, request: BuildRequest, triton: TritonRoot) -> None:
    """Check that the Triton can serve a model of this name, and an unpacked environment here."""
    if not triton.rules.activates:
        return
    server = f"Triton {triton.release}"
    cause = (
        f"{server} starts the model's stub by a line of bash, without quotes. "
        "A name or path in it may have ASCII letters, digits and @%+=:,./-_ only."
    )
    if not is_plain(request.model):
        raise UsageError(
            f"--model {request.model!r}: {server} cannot serve a model of this name.",
            cause=cause,
            remedy="Give another name.",
        )
    # Triton resolves links in the path of an environment, so no link helps here.
    places = [workspace.cache.root] if request.smoke else []
    if request.smoke or request.warm:
        places.append(request.model_folder)
    for place in map(os.path.realpath, places):
        if request.layout.name == "directory" and not is_plain(place):
            raise VllmEnvError(
                f"--layout directory: {server} cannot use an environment in {place}.",
                cause=cause,
                remedy="Use --layout parts, or another folder (--model-repository DIR, "
                "VLLM_ENV_CACHE=DIR). If the server will mount it elsewhere: --no-smoke-run.",
            )


def _check_elsewhere(request: BuildRequest, triton: TritonRoot) -> str:
    """Return why a model for a Triton that is not here is not served, or an empty string.

    Raises:
        UsageError: the user has asked for what needs this Triton.
    """
    asked = {
        "--warm": request.warm,
        "--smoke-run": request.smoke_again,
        "--smoke-model": bool(request.smoke_model),
        f"--stub {request.stub}": request.stub != "auto",
    }
    for option, is_given in asked.items():
        if is_given:
            raise UsageError(
                f"{option}: with --triton-release, Triton {triton.release} is not on this machine.",
                remedy=f"Omit {option}, or build in the container {image_of(triton.release)}, "
                "without --triton-release.",
            )
    return f"Triton {triton.release} is not on this machine" if request.smoke else ""


def _check_gpu(request: BuildRequest, profile: str) -> str:
    """Return why this machine cannot serve a model of this profile, or an empty string.

    Raises:
        VllmEnvError: it cannot, and the user has asked for it.
    """
    # The default profile is "cuda" only on a machine with a GPU.
    if profile != "cuda" or has_gpu():
        return ""
    cannot = "this machine has no GPU that programs here can use, and the profile is cuda."
    if request.warm:
        raise VllmEnvError(
            f"--warm: {cannot}",
            cause="vLLM compiles for the GPU that it runs on.",
            remedy="Run it where the model will be served (docker run --gpus all), or omit --warm.",
        )
    if not request.smoke:
        return ""
    if request.smoke_again or request.smoke_model:
        option = "--smoke-run" if request.smoke_again else "--smoke-model"
        raise VllmEnvError(
            f"{option}: {cannot}",
            cause="vLLM's build for CUDA starts only on a GPU.",
            remedy=f"Run it on a machine with a GPU (docker run --gpus all), or omit {option}: "
            "the model is then built, verified and published, but not served.",
        )
    return "no GPU"


def check_server(request: BuildRequest, profile: str) -> None:
    """Check that this machine can start the server that the request asks for, if any.

    Checked early: a build takes minutes before it serves the model.

    Raises:
        VllmEnvError: the loopback interface is down, or too little space is free.
    """
    if not request.smoke and not request.warm:
        return
    require_loopback()
    purpose = "the smoke run" if request.smoke else "--warm"
    if needed := request.layout.unpacked_space(profile):
        require_places(needed, purpose)
    require_space(
        Path(TMP),
        request.layout.extracted_space(profile),
        f"Triton's extraction for {purpose}",
        remedy="Free some space in /tmp or mount a larger file system there "
        "(Triton extracts nowhere else); --layout parts needs little, "
        "and --no-smoke-run leaves it to the server that will load the model.",
    )


def subject_of(request: BuildRequest, manifest: Manifest, triton: TritonRoot) -> Subject | None:
    """Return what a proof would be about; None if the files that are served are not all known."""
    # The layout "directory" has 60,000 files, and another model than the stand-in any.
    is_folder = request.layout.name == "directory"
    if is_folder or request.smoke_model or request.adoption:
        return None
    return Subject(request.model_folder, manifest, triton.path)


def _is_proved(workspace: Workspace, request: BuildRequest, triton: TritonRoot) -> bool:
    """Return whether the model that stands need not be served again, unless it is built anew."""
    if request.warm or request.smoke_again:
        return False
    try:
        manifest = read_manifest(request.model_folder)
    # It is built again.
    except VllmEnvError:
        return False
    subject = subject_of(request, manifest, triton) if manifest else None
    return bool(subject and recall(workspace.cache, subject))
