"""The build: the stages in their order, each with the value that the one before it returned."""

from __future__ import annotations

import dataclasses
import datetime
import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_env.archive.pack import Archive, archive_key, make_archive
from vllm_env.base import cache
from vllm_env.base.errors import VllmEnvError
from vllm_env.lock.lock import Lock, LockOptions, make_lock
from vllm_env.lock.pip_config import PipConfig, read_pip_config
from vllm_env.lock.spec import Overrides, Spec, load_spec
from vllm_env.prefix.prefix import Prefix, make_prefix, prefix_key
from vllm_env.publish.manifest import ARCHIVE_NAME, DIRECTORY_NAME, Manifest, describe_build, read_manifest
from vllm_env.publish.model_folder import stage_candidate
from vllm_env.publish.publish import BuiltSet, check_writable, publish
from vllm_env.publish.sbom import render_sbom
from vllm_env.serve.smoke import SmokeRequest, SmokeResult, smoke_run
from vllm_env.serve.standin import FACTS, ensure_standin
from vllm_env.serve.warm import Warmed, warm
from vllm_env.triton.provision import provision
from vllm_env.triton.root import TritonRoot, open_root
from vllm_env.triton.stub import Stub, StubOptions, make_stub, plan_stub, stub_identity
from vllm_env.verify import tree_rules as archive_rules
from vllm_env.verify import verify

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_env.base.console import Console

CHECKOUT = Path(__file__).resolve().parent.parent.parent
_EXTRACTED = {"cpu": 25 * 10**8, "cuda": 10**10}  # bytes that an environment of the profile unpacks to
_CONTAINER_ROOT = Path("/opt/tritonserver")


@dataclass(frozen=True)
class BuildRequest:
    """What the command line asks for."""

    profile: str | None = None
    overrides: Overrides = field(default_factory=Overrides)
    spec_file: Path | None = None
    triton_root: Path | None = None
    stub: str = "auto"
    stub_options: StubOptions = field(default_factory=StubOptions)
    layout: str = "archive"
    repository: Path = CHECKOUT / "model_repository"
    model: str = "vllm"
    lock: LockOptions = field(default_factory=LockOptions)
    keep: tuple[str, ...] = ()
    smoke: bool = True
    smoke_model: str = ""
    warm: bool = False


@dataclass(frozen=True)
class BuildResult:
    """What a build left: the model's folder and manifest, the smoke run's answers and vLLM's caches if asked for."""

    model: Path
    manifest: Manifest
    rebuilt: bool
    triton: TritonRoot
    smoke: SmokeResult | None = None
    warmed: Warmed | None = None


@dataclass(frozen=True)
class Plan:
    """What a build would do, known before anything long starts; ``stub`` is None if one is to be built."""

    spec: Spec
    triton: TritonRoot
    lock: Lock
    stub: Stub | None
    stub_options: StubOptions
    key: str
    prefix_key: str


def has_gpu() -> bool:
    """Tell whether this machine has an NVIDIA GPU that programs here can use."""
    return Path("/dev/nvidiactl").exists() or bool(
        shutil.which("nvidia-smi") and any(Path("/dev").glob("nvidia[0-9]*"))
    )


def installed_triton() -> Path | None:
    """Return the root of the container's Triton, else of the provisioned one, else None."""
    roots = (_CONTAINER_ROOT, CHECKOUT / ".triton")
    return next((root for root in roots if (root / "bin" / "tritonserver").is_file()), None)


def default_profile(triton: TritonRoot | None) -> str:
    """Return ``cuda`` in a Triton container with a GPU, else ``cpu``."""
    return "cuda" if triton and triton.path == _CONTAINER_ROOT and has_gpu() else "cpu"


def find_triton(root: Path | None, console: Console) -> TritonRoot:
    """Open the named Triton root, that of the container, or the one provisioned into ``.triton/``."""
    if root is not None:
        return open_root(root)
    if (_CONTAINER_ROOT / "bin" / "tritonserver").is_file():
        return open_root(_CONTAINER_ROOT)
    local = CHECKOUT / ".triton"
    if not (local / "RELEASE").is_file():
        with console.stage("triton") as stage:
            provision(local)
            stage.detail(f"a CPU Triton {open_root(local).release} in {local}")
    return open_root(local)


def make_plan(request: BuildRequest, root: Path, pip: PipConfig, console: Console) -> Plan:
    """Read the spec, resolve the lock and find the stub; check what can be checked before the long work.

    Raises:
        VllmEnvError: the request cannot be fulfilled.
    """
    check_writable(request.repository, request.model)
    triton = find_triton(request.triton_root, console)
    spec = load_spec(request.profile or default_profile(triton), request.overrides, request.spec_file)
    if request.warm and spec.profile == "cuda" and not has_gpu():
        raise VllmEnvError(
            "--warm: this machine has no GPU that programs here can use, and the profile is cuda.",
            cause="What vLLM compiles is for the very GPU that it runs on.",
            remedy="Run it where the model will be served (docker run --gpus all), or leave --warm away.",
        )
    if (request.smoke or request.warm) and request.layout == "archive":
        _require_space_to_extract(spec.profile, "the smoke run" if request.smoke else "--warm")
    options = dataclasses.replace(request.stub_options, gpu=spec.profile == "cuda")
    stub = plan_stub(triton, spec.python, request.stub, options)
    with console.stage("lock") as stage:
        lock = make_lock(spec, triton.rules, root, pip, request.lock, console.note)
        stage.detail(f"{spec.pin.value}: {len(lock.versions())} wheels, Python {lock.python}")
    for note in verify.check_plan(lock, stub, triton):
        console.note(note)
    prefix = prefix_key(lock, request.keep)
    key = cache.key_of(archive_key(prefix), stub_identity(stub, triton, lock.python, options), request.layout)
    return Plan(spec, triton, lock, stub, options, key, prefix)


def _require_space_to_extract(profile: str, what: str) -> None:
    cache.require_space(
        Path("/tmp"),  # noqa: S108 - hard-coded in Triton's pb_env.cc: TMPDIR does not move it
        _EXTRACTED[profile],
        f"Triton's extraction for {what}",
        remedy="Free some space in /tmp or mount a larger file system there (Triton extracts nowhere else); "
        "--layout directory needs none, and --no-smoke-run leaves it to the server that will load the model.",
    )


def build(request: BuildRequest, console: Console, *, dry_run: bool = False) -> BuildResult | Plan:
    """Build what is asked for and publish it, or return the plan of a dry run.

    Raises:
        VllmEnvError: a stage failed; what stood in the repository is as it was.
    """
    root = cache.cache_root()
    try:
        return _build(request, root, console, dry_run=dry_run)
    except KeyboardInterrupt:
        cache.remove_abandoned(root)  # it may have hit the very code that removes a staging folder
        raise


def _build(request: BuildRequest, root: Path, console: Console, *, dry_run: bool) -> BuildResult | Plan:
    waiting = lambda: console.note("another build is running; waiting for it to end")  # noqa: E731
    with cache.exclusive(root, waiting):
        for folder in cache.remove_abandoned(root):
            console.debug(f"removed {folder}, left by a build that was killed")
        pip = read_pip_config()
        plan = make_plan(request, root, pip, console)
        if dry_run:
            return plan
        target = request.repository / request.model
        published = _published(target, plan.key)
        if published:
            console.note(f"{target} is up to date; nothing to build")
            smoke = (
                _smoke(request, plan, target, _prefix(request, plan, root, pip, console), root, console)
                if request.smoke
                else None
            )
            result = BuildResult(target, published, rebuilt=False, triton=plan.triton, smoke=smoke)
        else:
            result = _build_anew(request, plan, root, pip, console, waiting)
        return dataclasses.replace(result, warmed=_warm(result, root, console)) if request.warm else result


def _build_anew(
    request: BuildRequest, plan: Plan, root: Path, pip: PipConfig, console: Console, waiting: Callable[[], None]
) -> BuildResult:
    prefix = _prefix(request, plan, root, pip, console)
    stub = _stub(plan, prefix, root, console)
    archive = _archive(request, prefix, root, console)
    manifest = _manifest(request, plan, prefix, stub, archive)
    environment = archive.path if archive else prefix.path
    built = BuiltSet(stub.path, environment, request.layout, manifest.to_json(), render_sbom(plan.lock))
    _verify(plan, prefix, stub, archive, root, console)
    template = CHECKOUT / "model_repository" / "vllm"
    smoke = None
    if request.smoke:
        with cache.staging(root) as staging:
            candidate = staging / request.model
            stage_candidate(built, request.repository / request.model, template, candidate)
            smoke = _smoke(request, plan, candidate, prefix, root, console)
    with console.stage("publish") as stage:
        model = publish(built, request.repository, request.model, template, waiting)
        stage.detail(str(model))
    cache.evict(root, {prefix.path.parent, environment})
    return BuildResult(model, manifest, rebuilt=True, triton=plan.triton, smoke=smoke)


def _prefix(request: BuildRequest, plan: Plan, root: Path, pip: PipConfig, console: Console) -> Prefix:
    with console.stage("prefix") as stage:
        prefix = make_prefix(plan.lock, root, pip, request.lock, request.keep, _shown(stage))
        stage.detail("reused" if prefix.reused else f"{len(plan.lock.versions())} wheels, bytecode compiled")
    return prefix


def _stub(plan: Plan, prefix: Prefix, root: Path, console: Console) -> Stub:
    with console.stage("stub") as stage:
        stub = make_stub(plan.stub, plan.triton, prefix.path, plan.lock.python, root, plan.stub_options, stage.detail)
        stage.detail(f"{stub.origin}, Python {stub.python}, Triton {stub.release}")
    return stub


def _verify(plan: Plan, prefix: Prefix, stub: Stub, archive: Archive | None, root: Path, console: Console) -> None:
    """Verify what is new; what is reused passed before, or the build that made it failed right here."""
    members = archive.members if archive else 0
    expected = archive_rules.expected_of_lock(plan.lock, stub.python, stub.release, members)
    key = verify.verified_key(archive.sha256 if archive else prefix.key, stub.sha256, expected)
    with console.stage("verify") as stage:
        if verify.is_verified(root, key):
            stage.detail("passed before")
            return
        if archive:
            size = archive.unpacked
            notes = verify.verify_archive(archive.path, expected, root, plan.triton, unpacked=size, report=stage.detail)
        else:
            notes = verify.verify_directory(prefix.path, expected, root, report=stage.detail)
        for note in notes:
            console.note(note)
        verify.mark_verified(root, key)
        stage.detail("loader rules, no trace of the build, imports without activation")


def _archive(request: BuildRequest, prefix: Prefix, root: Path, console: Console) -> Archive | None:
    if request.layout == "directory":
        return None
    with console.stage("archive") as stage:
        archive = make_archive(prefix, root, _shown(stage))
        reused = "reused, " if archive.reused else ""
        stage.detail(f"{reused}{archive.size / 1e6:.0f} MB, {archive.unpacked / 1e9:.2f} GB unpacked")
    return archive


def _shown(stage: Any) -> Callable[[float, str], None]:
    def show(fraction: float, step: str) -> None:
        stage.update(fraction)
        stage.detail(step)

    return show


def _manifest(request: BuildRequest, plan: Plan, prefix: Prefix, stub: Stub, archive: Archive | None) -> Manifest:
    if archive:
        facts = {
            "name": ARCHIVE_NAME,
            "sha256": archive.sha256,
            "size": archive.size,
            "members": archive.members,
            "unpacked": archive.unpacked,
        }
    else:
        facts = {"name": DIRECTORY_NAME, "size": 0, "sha256": "", "key": prefix.key}
    return describe_build(
        key=plan.key,
        layout=request.layout,
        lock=plan.lock,
        triton=plan.triton,
        stub=stub,
        archive=facts,
        pruned=prefix.pruned,
        built_at=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )


def _published(target: Path, key: str) -> Manifest | None:
    """Return the manifest of what stands in the repository if it is what would be built; sizes tell a cut-off file."""
    manifest = read_manifest(target)
    if manifest is None or manifest.key != key:
        return None
    environment = target / str(manifest.archive["name"])
    stub = target / str(manifest.stub["name"])
    whole = environment.is_dir() or (environment.is_file() and environment.stat().st_size == manifest.archive["size"])
    stub_is_whole = stub.is_file() and cache.file_sha256(stub) == manifest.stub["sha256"] and os.access(stub, os.X_OK)
    return manifest if whole and stub_is_whole else None


def _smoke(request: BuildRequest, plan: Plan, model: Path, prefix: Prefix, root: Path, console: Console) -> SmokeResult:
    prompts = CHECKOUT / "prompts.txt"
    expected: dict[str, str] = {}
    engine_model = request.smoke_model
    if not engine_model:
        with console.stage("stand-in") as stage:
            engine_model = str(ensure_standin(prefix.python, root, report=stage.detail))
            expected = dict(FACTS)
    log = root / "smoke-server.log"
    log.unlink(missing_ok=True)
    with console.stage("smoke run") as stage, cache.staging(root) as scratch:
        smoke = smoke_run(
            SmokeRequest(
                binary=plan.triton.binary,
                model_folder=model,
                engine_model=engine_model,
                client=CHECKOUT / "client" / "client.py",
                client_python=Path(sys.executable),
                prompts=prompts,
                scratch=scratch,
                log=log,
                gpu=plan.spec.profile == "cuda" and has_gpu(),
                expected=expected,
            ),
            on_wait=lambda seconds: stage.detail(f"tritonserver loads, {seconds:.0f} s"),
        )
        stage.detail(f"ready after {smoke.ready_seconds:.0f} s, {len(smoke.answers)} answers")
    return smoke


def _warm(result: BuildResult, root: Path, console: Console) -> Warmed:
    with console.stage("warm") as stage:
        done = warm(
            result.triton.binary,
            result.model,
            log=root / "warm-server.log",
            on_wait=lambda seconds: stage.detail(f"tritonserver loads {result.model.name}, {seconds:.0f} s"),
            waiting=lambda: console.note(f"another build publishes in {result.model.parent}; waiting for it to end"),
        )
        stage.detail(f"ready after {done.ready_seconds:.0f} s, {done.files} files, {done.size / 1e6:.0f} MB")
    return done
