"""The plan of a build: its exact files.

``resolve`` makes what a sketch lacks: a Triton, a wheel of the pinned vLLM and the lock. A dry run
resolves into a temporary folder, and makes no Triton and no wheel.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from vllm_env.base import report
from vllm_env.base.cache import key_of
from vllm_env.base.driver import too_old
from vllm_env.base.errors import VllmEnvError
from vllm_env.base.filesystem import file_sha256
from vllm_env.base.sources import masked
from vllm_env.base.workspace import Workspace
from vllm_env.lock.lock import make_lock
from vllm_env.lock.pins import NotKnownError
from vllm_env.lock.pylock import Lock
from vllm_env.model.manifest import Manifest, read_manifest
from vllm_env.prefix.prefix import prefix_key
from vllm_env.sketch import PROVISIONED, BuildRequest, Sketch, make_sketch
from vllm_env.triton.provision import provision
from vllm_env.triton.root import STUB_LIBRARIES, TritonRoot, open_root
from vllm_env.triton.stub import StubChoice, choose_stub
from vllm_env.triton.stub_source import StubOptions
from vllm_env.verify.verify import check_lock

UNKNOWN = "known after the build"
"""A dry run prints this for a value that only a build can know."""


@dataclass(frozen=True)
class Plan:
    """The plan of a build.

    Attributes:
        sketch: the build.
        triton: the Triton that will serve the model. In a dry run it may be missing.
        lock: the exact files.
        stub: where the stub comes from.
        key: content key of the set of files to publish; empty if a dry run cannot know it.
    """

    sketch: Sketch
    triton: TritonRoot
    lock: Lock
    stub: StubChoice
    key: str


@dataclass(frozen=True)
class Preview:
    """What a dry run knows of a build.

    Attributes:
        sketch: the build.
        stub: where the stub comes from.
        plan: the plan; None if the lock depends on a wheel that must be built or fetched first.
        forecast: how a build would get that wheel; empty with a plan.
    """

    sketch: Sketch
    stub: StubChoice
    plan: Plan | None
    forecast: str = ""

    @property
    def lock(self) -> Lock | None:
        """Return the exact files, if they are known."""
        return self.plan.lock if self.plan else None

    @property
    def key(self) -> str:
        """Return the content key of the set of files; empty if it is not known."""
        return self.plan.key if self.plan else ""


def resolve(workspace: Workspace, sketch: Sketch) -> Plan:
    """Resolve the lock and choose the stub; first make a Triton and a wheel that are missing.

    A dry run makes neither, and writes no lock.

    Raises:
        VllmEnvError: something is wrong that would let the build fail, perhaps minutes later.
        NotKnownError: a dry run cannot know the lock.
    """
    request = sketch.request
    triton = sketch.triton
    is_needed = not (workspace.dry_run or sketch.is_foreign)
    if is_needed and not (triton.is_there or triton.is_elsewhere):
        triton = _provision(workspace)
    with report.stage("lock"):
        lock = make_lock(workspace, sketch.spec, triton.rules, request.lock)
        pinned = masked(sketch.spec.pin.value)
        report.step(f"{pinned}: {len(lock.wheels)} wheels, Python {lock.python}")
    stub = choose_stub(workspace, triton, lock.python, request.stub, sketch.stub_options)
    is_compiled = not stub.prebuilt and not triton.is_elsewhere
    # Only for options: the same settings as environment variables are meant for all builds.
    if not is_compiled and request.stub_options != StubOptions.of():
        report.note("--triton-git-url, --boost-url and --jobs have no effect: no stub is compiled")
    for note in check_lock(lock, triton):
        report.note(note)
    if not sketch.is_foreign:
        _check_driver(lock, serves=request.smoke or request.warm)
    packed_key = request.layout.key(prefix_key(lock, request.keep))
    # A dry run does not install a missing Triton, and its stub has no digest before that.
    has_identity = triton.is_there or triton.is_elsewhere
    key = key_of(packed_key, stub.identity, request.layout.name) if has_identity else ""
    return Plan(sketch, triton, lock, stub, key)


def _check_driver(lock: Lock, *, serves: bool) -> None:
    """Report if this machine's NVIDIA driver is too old for the lock's CUDA version.

    Raises:
        VllmEnvError: it is too old, and the build will serve the model here.
    """
    # A CPU build has no CUDA version.
    what, remedy = too_old(lock.cuda) if lock.cuda else ("", "")
    if what and serves:
        raise VllmEnvError(
            what, remedy=f"{remedy} To build it for another machine: --no-smoke-run."
        )
    if what:
        report.note(f"{what} {remedy}")


def _provision(workspace: Workspace) -> TritonRoot:
    """Install the CPU Triton and return its root."""
    with report.stage("triton"):
        provision(workspace, PROVISIONED)
        triton = open_root(PROVISIONED)
        report.step(f"a CPU Triton {triton.release} in {PROVISIONED}")
    return triton


def preview(workspace: Workspace, request: BuildRequest) -> Preview:
    """Return what a build would do; write only into a temporary folder."""
    with workspace.for_dry_run() as scratch:
        sketch = make_sketch(scratch, request)
        try:
            plan = resolve(scratch, sketch)
        except NotKnownError as unknown:
            report.note(f"{unknown.what} The lock is known after the build.")
            python = sketch.spec.python
            stub = choose_stub(scratch, sketch.triton, python, request.stub, sketch.stub_options)
            return Preview(sketch, stub, plan=None, forecast=unknown.forecast)
        return Preview(sketch, plan.stub, plan)


def published_with(model: Path, key: str) -> Manifest | None:
    """Return the manifest of the published model if it has this content key, else None."""
    try:
        manifest = read_manifest(model)
    # It is damaged, or of another version of this tool. The message says "Build it again".
    except VllmEnvError:
        return None
    return manifest if manifest and manifest.key == key else None


def find_published(target: Path, key: str) -> Manifest | None:
    """Return the manifest of the published model if a build would give the same, else None.

    None also if a file of the model is missing or cut off, or Triton could not start the stub.
    """
    manifest = published_with(target, key)
    # is_whole() compares sizes only: an archive has several GB.
    if manifest is None or not manifest.is_whole(target):
        return None
    stub = target / manifest.stub.name
    # The server uses its own stub. A file in the model would take its place.
    if not manifest.stub.is_in_model:
        return None if stub.exists() else manifest
    # Triton executes the stub. A copy by way of an object store loses the mode.
    is_executable = stub.is_file() and os.access(stub, os.X_OK)
    # An older version of this tool published no libraries of the stub. Then build again.
    has_libraries = (target / STUB_LIBRARIES).is_dir()
    is_whole = is_executable and has_libraries and file_sha256(stub) == manifest.stub.sha256
    return manifest if is_whole else None
