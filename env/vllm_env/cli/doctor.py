"""``doctor``: report what this machine and its Triton can do, and a remedy for each problem."""

import os
import re
import resource
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from vllm_env.base.command import COMMAND
from vllm_env.base.driver import complaint, cuda_of_driver
from vllm_env.base.errors import CommandError, VllmEnvError
from vllm_env.base.filesystem import free_space
from vllm_env.base.process import capture
from vllm_env.base.workspace import Workspace
from vllm_env.inside import parts_places
from vllm_env.interpreter.find import find_interpreter
from vllm_env.interpreter.layer import remote_url
from vllm_env.layout.unpacked import local_places
from vllm_env.lock.lock import lock_beside
from vllm_env.lock.pylock import read_pylock, versions_of
from vllm_env.lock.spec import Spec
from vllm_env.lock.variants import cuda_of, cuda_of_versions
from vllm_env.model.manifest import FOREIGN_REMEDY, MANIFEST_NAME, foreign
from vllm_env.prefix.prefix import BUILD_SPACE, EXTRACTED_SPACE
from vllm_env.triton.root import NEWEST_KNOWN, TritonRoot, is_known

# Without a persistence daemon, nvidia-smi wakes each GPU. If the driver hangs, it never ends.
_SMI_SECONDS = 30.0
_OPEN_FILES_LIMIT = 4096


@dataclass(frozen=True)
class Finding:
    """The result of one check: ``state`` is ``ok``, ``warning`` or ``problem``."""

    name: str
    state: str
    what: str
    remedy: str = ""


def examine(workspace: Workspace, triton: TritonRoot | None, spec: Spec) -> list[Finding]:
    """Check what a build and a server need; return the findings, the most important first."""
    return [
        _check_triton(triton),
        _check_stub(triton, spec),
        _check_interpreter(workspace, spec),
        _check_gpu(spec),
        _check_cache(workspace, spec),
        _check_unpacked(spec),
        _check_shared_memory(),
        _check_open_files(),
        _check_ports(),
        _check_hub(),
        _check_compiler(spec),
    ]


def foreign_models(repository: Path) -> list[Finding]:
    """Return a problem for each model of a repository that this machine cannot serve."""
    folders = sorted(file.parent for file in repository.glob(f"*/{MANIFEST_NAME}"))
    sentences = {folder: foreign(folder) for folder in folders}
    return [
        Finding("model", "problem", f"{folder}: {sentence}", FOREIGN_REMEDY)
        for folder, sentence in sentences.items()
        if sentence
    ]


def _judge(name: str, *, is_fine: object, what: str, remedy: str) -> Finding:
    """Return a finding that is ``ok``, or a warning with a remedy."""
    return Finding(name, "ok", what) if is_fine else Finding(name, "warning", what, remedy)


def _check_triton(triton: TritonRoot | None) -> Finding:
    """Report the Triton and what its release does otherwise than the newest one.

    A release that is newer than the table of rules is a warning, and so is no Triton.
    """
    if triton is None:
        remedy = "The first build provisions a CPU Triton into .triton/."
        return Finding("Triton", "warning", "none here yet", remedy)
    what = f"{triton.release} in {triton.path}"
    # The rules of a newer release have not been checked.
    if not is_known(triton.release):
        what = f"{what}, newer than the table of releases ({NEWEST_KNOWN})"
        return Finding("Triton", "warning", what, "The newest row is used.")
    # Facts for the user. The build allows for both, so they are no warning.
    defects = []
    # Its stub has pybind11 2.10: strings of NumPy 2 arrive as garbage and it aborts.
    if triton.rules.numpy_bound:
        defects.append("its stub cannot read NumPy 2, so the environment has 1.26")
    # Triton extracts with libarchive's SECURE flags only since 26.06. This is said of the releases
    # that no longer activate the environment, from 25.08 on.
    if not triton.rules.activates and not triton.rules.secure_extraction:
        defects.append(
            "its extraction follows links out of the archive; verify refuses such archives"
        )
    return Finding("Triton", "ok", "; ".join([what, *defects]))


def _check_stub(triton: TritonRoot | None, spec: Spec) -> Finding:
    """Report whether the Triton has a stub for the spec's Python, or one must be compiled."""
    if triton is None:
        remedy = "Build, or name one with --triton-root."
        return Finding("stub", "warning", "not known without a Triton", remedy)
    if spec.python in triton.stubs:
        return Finding("stub", "ok", f"Python {spec.python}: {triton.stubs[spec.python]}")
    what = f"none for Python {spec.python} (there are: {', '.join(triton.stubs) or 'none'})"
    remedy = "--stub source builds one; it needs git, a compiler and access to the sources."
    return Finding("stub", "warning", what, remedy)


def _check_interpreter(workspace: Workspace, spec: Spec) -> Finding:
    """Report where a build takes the interpreter from: conda-forge, else this machine.

    It is a warning if this machine's Python lacks its C headers, and a problem if there is none.
    """
    if workspace.network.answers(remote_url()):
        return Finding("interpreter", "ok", "conda-forge answers")
    try:
        found = find_interpreter(spec.python)
    except VllmEnvError as error:
        return Finding("interpreter", "problem", f"{error.what} {error.cause}", error.remedy)
    # The Python of conda-forge has its C headers, the one of this machine may not.
    return _judge(
        "interpreter",
        is_fine=found.headers,
        what=f"conda-forge does not answer; "
        f"Python {found.version} of this machine, {found.executable}",
        remedy="torch.compile and GPU kernels need its C headers: "
        f"apt-get install libpython{spec.python}-dev.",
    )


def _check_gpu(spec: Spec) -> Finding:
    """Report the first GPU; it is a problem if vLLM or the spec's CUDA version cannot use it.

    No GPU is a problem for the profile cuda only.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        remedy = "docker run needs --gpus all." if spec.profile == "cuda" else ""
        state = "problem" if remedy else "ok"
        return Finding("GPU", state, "none that this machine can use", remedy)
    try:
        name, driver, capability, memory = _first_gpu(program)
    except VllmEnvError as error:
        return Finding("GPU", "problem", error.what, error.remedy)
    what = f"{name}, {memory}, driver {driver}, compute capability {capability}"
    compute = _numbers(capability)
    if not _numbers(driver) or not compute:
        what = f"{what}: the driver gives no number for one of these"
        remedy = "Restart the machine or its driver; if that does not help, update the driver."
        return Finding("GPU", "problem", what, remedy)
    too_old, remedy = complaint(cuda_of_driver(), driver, _cuda_of(spec))
    if too_old:
        return Finding("GPU", "problem", f"{what}. {too_old}", remedy)
    if compute < (7, 5):
        what = f"{what}: vLLM's wheels begin with 7.5"
        return Finding("GPU", "problem", what, "Use a newer GPU, or an older vLLM.")
    return Finding("GPU", "ok", what)


def _cuda_of(spec: Spec) -> str:
    """Return the CUDA version of an environment of a spec; "" for the CPU, or without a lock."""
    file = lock_beside(spec.path, spec.profile, spec.target)
    if spec.torch_backend or not file.is_file():
        return cuda_of(spec.torch_backend)
    return cuda_of_versions(versions_of(read_pylock(file).wheels))


def _first_gpu(program: str) -> list[str]:
    """Return name, driver version, compute capability and memory of the first GPU, by nvidia-smi.

    Raises:
        VllmEnvError: nvidia-smi fails, hangs or names no GPU.
    """
    query = "--query-gpu=name,driver_version,compute_cap,memory.total"
    try:
        status, output = capture([program, query, "--format=csv,noheader"], seconds=_SMI_SECONDS)
    except CommandError as error:
        raise VllmEnvError(
            f"{error.what} The driver hangs, or has no nvidia-smi of its own.",
            remedy="Restart the machine, or the driver; its reason is in dmesg (grep NVRM).",
        ) from error
    # ld.so may print a line before the first GPU's. A name may have a comma.
    lines = [line.rsplit(",", 3) for line in output.splitlines() if line.count(",") >= 3]
    if status == 0 and lines:
        return [part.strip() for part in lines[0]]
    # Without a GPU, nvidia-smi ends with 0, too.
    what = f"nvidia-smi fails with status {status} and" if status else "nvidia-smi names no GPU; it"
    raise VllmEnvError(
        f"{what} says: {' '.join(output.split())[:200] or 'nothing'}",
        remedy="Check the driver (dmesg | grep NVRM); docker run needs --gpus all.",
    )


def _numbers(version: str) -> tuple[int, ...]:
    """Return a version's first two numbers; an empty tuple for a string such as ``[N/A]``."""
    match = re.fullmatch(r"(\d+)\.(\d+).*", version)
    return tuple(map(int, match.groups())) if match else ()


def _check_cache(workspace: Workspace, spec: Spec) -> Finding:
    """Report whether the cache has the space for a build."""
    remedy = f"Free some ({COMMAND} clean), or name a larger file system: VLLM_ENV_CACHE=DIR."
    return _check_space("cache", workspace.cache.root, BUILD_SPACE[spec.profile], remedy)


def _check_unpacked(spec: Spec) -> Finding:
    """Report the first folder with space for the unpacked environment of a served model."""
    needed = EXTRACTED_SPACE[spec.profile]
    remedy = f"Name a folder on a local disk with enough space: {parts_places.VARIABLE}=DIR."
    local = local_places()
    if not local:
        what = f"{parts_places.places()[0]} and the others are on a network file system"
        return Finding("unpacked", "problem", what, remedy)
    fitting = [folder for folder in local if free_space(folder) >= needed]
    # If none has the space, report the one that a served model prefers.
    return _check_space("unpacked", [*fitting, *local][0], needed, remedy)


def _check_space(name: str, folder: Path, needed: int, remedy: str) -> Finding:
    free = free_space(folder)
    what = f"{free / 1e9:.0f} GB free in {folder}, {needed / 1e9:.1f} GB are needed"
    if free >= needed:
        return Finding(name, "ok", what)
    return Finding(name, "problem", what, remedy)


def _check_shared_memory() -> Finding:
    """Warn if POSIX shared memory, by which stub and server talk, has less than 0.5 GB."""
    size = shutil.disk_usage("/dev/shm").total / 1e9  # noqa: S108 - POSIX shared memory is there
    # Docker's default of 64 MB is not enough.
    return _judge(
        "shared memory",
        is_fine=size >= 0.5,
        what=f"{size:.2f} GB in /dev/shm",
        remedy="docker run --shm-size=1g (each stub takes some, tensor parallelism more).",
    )


def _check_open_files() -> Finding:
    """Warn if this process, and so a server that it starts, may open too few files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_limit = f"ulimit -n {_OPEN_FILES_LIMIT}"
    # Only root can raise the hard limit.
    if hard != resource.RLIM_INFINITY and hard < _OPEN_FILES_LIMIT:
        raise_limit = f"docker run --ulimit nofile={_OPEN_FILES_LIMIT}, or as root {raise_limit}"
    return _judge(
        "open files",
        is_fine=soft == resource.RLIM_INFINITY or soft >= _OPEN_FILES_LIMIT,
        what=f"limit {_shown(soft)} (at most {_shown(hard)})",
        remedy=f"{raise_limit}: each connection takes one.",
    )


def _shown(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


def _check_ports() -> Finding:
    """Warn if something listens on one of Triton's usual ports."""
    # Triton's defaults for HTTP, gRPC and metrics. It binds them only after it has loaded a model.
    taken = [port for port in (8000, 8001, 8002) if is_taken(port)]
    return _judge(
        "ports",
        is_fine=not taken,
        what=f"taken: {', '.join(map(str, taken))}" if taken else "8000, 8001 and 8002 are free",
        remedy="Start tritonserver with --http-port, --grpc-port, --metrics-port.",
    )


def is_taken(port: int) -> bool:
    """Return whether something listens on a port of this machine."""
    with socket.socket() as probe:
        # The machine may be busy.
        probe.settimeout(5)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _check_hub() -> Finding:
    """Report how many models the Hugging Face hub's cache has, and whether there is a token."""
    # The variable and the folder of huggingface_hub.
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    models = len(list((home / "hub").glob("models--*")))
    token = os.environ.get("HF_TOKEN") or (home / "token").is_file()
    what = f"{models} models cached in {home}, {'a' if token else 'no'} token"
    remedy = "" if token else "Gated models need HF_TOKEN in the server's environment."
    return Finding("model hub", "ok", what, remedy)


def _check_compiler(spec: Spec) -> Finding:
    """Warn if there is no compiler for what vLLM compiles at run time."""
    # The launchers of GPU kernels are in C. On a CPU, torch.compile writes C++.
    if spec.profile == "cuda":
        program = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
        has_own = any(Requirement(text).name == "ziglang" for text in spec.requirements)
        absence = "none, and the environment brings none"
        if has_own:
            absence = "none here; the environment brings its own"
        return _judge(
            "C compiler",
            is_fine=program or has_own,
            what=program or absence,
            remedy="GPU kernels need one: --with ziglang, or apt-get install gcc.",
        )
    program = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    return _judge(
        "C++ compiler",
        is_fine=program,
        what=program or "none: models run eagerly (enforce_eager)",
        remedy="torch.compile needs one: apt-get install g++.",
    )
