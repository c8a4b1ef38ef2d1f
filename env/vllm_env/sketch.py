"""The sketch of a build: all that is known before anything is fetched or written.

It finds what would let the build fail minutes later.
"""

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path

from vllm_env.base.errors import UsageError, VllmEnvError
from vllm_env.base.filesystem import require_space
from vllm_env.base.machine import has_gpu, this_platform
from vllm_env.base.network import require_loopback
from vllm_env.base.workspace import PLACE, TEMPLATE, Workspace
from vllm_env.layout.layout import Layout
from vllm_env.layout.layouts import LAYOUTS
from vllm_env.layout.unpacked import require_places
from vllm_env.lock.lock import LockOptions
from vllm_env.lock.spec import Overrides, Spec, load_spec, only_profile
from vllm_env.model.files import check_model_folder
from vllm_env.model.manifest import Manifest, read_manifest
from vllm_env.publish.adopt import Adoption
from vllm_env.publish.model_config import changes_count
from vllm_env.publish.publish import check_writable
from vllm_env.serve.proof import Subject, recall
from vllm_env.serve.smoke import SmokeResult
from vllm_env.triton.elsewhere import image_of, triton_elsewhere
from vllm_env.triton.provision import to_be_provisioned
from vllm_env.triton.root import CONTAINER_ROOT, TritonRoot, is_plain, open_root
from vllm_env.triton.stub import StubMode, choose_stub
from vllm_env.triton.stub_source import StubOptions

PROVISIONED = PLACE / ".triton"
"""The folder of the CPU Triton that is made for machines without a Triton."""
# Triton's pb_env.cc has this folder in its code. TMPDIR does not change it.
TMP = "/tmp"  # noqa: S108


@dataclass(frozen=True)
class BuildRequest:
    """The request of the command line.

    Attributes:
        platform: the machines that it is for; empty for those like this one.
        smoke: whether to serve the result if this machine can.
        smoke_again: whether the user has asked for the smoke run (``--smoke-run``).
        smoke_model: the model of the smoke run if it is not the stand-in.
        count: the instances to write into ``config.pbtxt``; 0 leaves it as it is.
    """

    profile: str | None = None
    overrides: Overrides = field(default_factory=Overrides)
    spec_file: Path | None = None
    platform: str = ""
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
class Sketch:
    """A build as far as this machine's files tell it.

    Attributes:
        request: the request; without a smoke run if this machine cannot serve the model.
        spec: the profile with the command line's changes.
        triton: the Triton that will serve the model. It may have to be provisioned.
        unserved: why this machine cannot serve the model; empty if it can, or need not.
        proof: the answers of the published model if nothing has changed since it was served.
    """

    request: BuildRequest
    spec: Spec
    triton: TritonRoot
    unserved: str = ""
    proof: SmokeResult | None = None

    @property
    def stub_options(self) -> StubOptions:
        """Return how to build a stub of this profile."""
        # A stub for cuda shares GPU memory with the server.
        return dataclasses.replace(self.request.stub_options, gpu=self.spec.profile == "cuda")

    @property
    def is_foreign(self) -> bool:
        """Return whether it is for another kind of machine, whose programs do not run here."""
        return self.spec.target != this_platform()

    @property
    def serves_anyway(self) -> bool:
        """Return whether a server is started even if there is nothing to build."""
        return self.request.warm or (self.request.smoke and not self.proof)


def installed_triton() -> Path | None:
    """Return the root of the container's Triton, else of the provisioned one, else None."""
    for root in (CONTAINER_ROOT, PROVISIONED):
        if (root / "bin" / "tritonserver").is_file():
            return root
    return None


def choose_profile(
    named: str | None,
    root: Path | None,
    overrides: Overrides,
    spec_file: Path | None = None,
) -> str:
    """Return the profile of a build: the named one, the spec's only one, else the default.

    The default is ``cuda`` with ``--cuda`` or in a Triton container with a GPU, else ``cpu``.
    """
    if named:
        return named
    # A spec that --save wrote has only one profile: the user need not name it.
    if profile := only_profile(spec_file) if spec_file else None:
        return profile
    # Another Triton here is the provisioned one, which has no support for GPUs.
    is_for_gpu = root == CONTAINER_ROOT and has_gpu()
    return "cuda" if overrides.torch_backend or is_for_gpu else "cpu"


def find_triton(workspace: Workspace, root: Path | None, release: str = "") -> TritonRoot:
    """Open the named Triton root, else the container's, else the provisioned one.

    If there is none, return the one that a build would provision. But if a ``release`` is given
    and there is neither a named root nor the container's, the Triton is on another machine.

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
    # It need not be installed for this: the content of its pinned wheel is known.
    return to_be_provisioned(workspace, PROVISIONED)


def _is_elsewhere(root: Path | None, release: str) -> bool:
    """Return whether the model is for a server on another machine.

    This is so if the user has asked for a release, and this machine has no Triton of the user's.
    The provisioned Triton is the build's own. It does not count, even if it is of this release.

    Args:
        root: the Triton root that the user has named, or that was found here.
        release: the release that the user has asked for; empty if none.
    """
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


def make_sketch(workspace: Workspace, request: BuildRequest) -> Sketch:
    """Read the spec, find the Triton, and check that this machine can do the build.

    Raises:
        VllmEnvError: something is wrong that would let the build fail, perhaps minutes later.
    """
    # 1) Where the set goes
    check_writable(request.repository, request.model)
    check_model_folder(request.model_folder)
    # Raises an error if --count cannot be written into the configuration.
    changes_count(request.model_folder, request.count)
    # 2) What it is made for
    root = request.triton_root or installed_triton()
    profile = choose_profile(request.profile, root, request.overrides, request.spec_file)
    spec = load_spec(profile, request.overrides, request.spec_file, request.platform)
    # 3) The Triton that will serve it, and why it cannot serve here, if so
    if _is_elsewhere(root, spec.triton_release):
        unserved = _check_elsewhere(request, triton_elsewhere(spec.triton_release))
    else:
        unserved = _check_gpu(request, profile)
    triton = find_triton(workspace, request.triton_root, spec.triton_release)
    if unserved:
        # Without a smoke run, the checks below do not ask for what a server here would need.
        request = dataclasses.replace(request, smoke=False)
    proof = find_proof(workspace, request, triton)
    sketch = Sketch(request, spec, triton, unserved, proof)
    _check_paths(workspace, request, triton)
    if sketch.serves_anyway:
        check_server(request, profile)
    # Checked before the lock, which may take minutes to resolve.
    if request.stub == "prebuilt" or triton.is_elsewhere:
        choose_stub(workspace, triton, spec.python, request.stub, sketch.stub_options)
    return sketch


def _check_paths(workspace: Workspace, request: BuildRequest, triton: TritonRoot) -> None:
    """Check that the Triton can serve a model of this name, and an unpacked environment here.

    Raises:
        VllmEnvError: the name or a path has a character that breaks Triton's line of bash.
    """
    # Only older releases activate the environment, by a line of bash with its path.
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
    # The smoke run serves a copy in the cache. Triton resolves links in the path of an environment,
    # so no link helps here.
    places = [workspace.cache.root] if request.smoke else []
    # With either, a server on this machine will load the published folder, too.
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

    The string is empty if the user has asked for no smoke run.

    Raises:
        UsageError: an option needs this Triton.
    """
    given = {
        "--warm": request.warm,
        "--smoke-run": request.smoke_again,
        "--smoke-model": bool(request.smoke_model),
        f"--stub {request.stub}": request.stub != "auto",
    }
    for option, is_given in given.items():
        if is_given:
            raise UsageError(
                f"{option}: with --triton-release, Triton {triton.release} is not on this machine.",
                remedy=f"Omit {option}, or build in the container {image_of(triton.release)}, "
                "without --triton-release.",
            )
    return f"Triton {triton.release} is not on this machine" if request.smoke else ""


def _check_gpu(request: BuildRequest, profile: str) -> str:
    """Return why this machine cannot serve a model of this profile, or an empty string.

    The string is empty, too, if the user has asked for no smoke run.

    Raises:
        VllmEnvError: it cannot, and the user has asked for it by an option.
    """
    # Without --profile and --cuda, the profile is "cuda" only on a machine with a GPU.
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
    """Return what a kept smoke run would prove; None if it cannot tell whether a file changed."""
    # The layout "directory" has 60,000 files. Of another model than the stand-in, they are unknown.
    is_folder = request.layout.name == "directory"
    if is_folder or request.smoke_model or request.adoption:
        return None
    return Subject(request.model_folder, manifest, triton.path)


def find_proof(
    workspace: Workspace, request: BuildRequest, triton: TritonRoot
) -> SmokeResult | None:
    """Return the answers of the published model if nothing has changed since it was served."""
    if not request.smoke or request.smoke_again:
        return None
    try:
        manifest = read_manifest(request.model_folder)
    # The manifest is damaged or of another version. Such a model is built again.
    except VllmEnvError:
        return None
    subject = subject_of(request, manifest, triton) if manifest else None
    return recall(workspace.cache, subject) if subject else None
