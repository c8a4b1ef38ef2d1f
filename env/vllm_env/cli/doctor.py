"""``doctor``: report what this machine and its Triton can do, and a remedy for each problem."""

import os
import re
import resource
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from vllm_env.base.errors import CommandError, VllmEnvError
from vllm_env.base.filesystem import free_space
from vllm_env.base.process import capture
from vllm_env.base.workspace import Workspace
from vllm_env.interpreter.find import find_interpreter
from vllm_env.interpreter.layer import remote_url
from vllm_env.lock.spec import Spec
from vllm_env.prefix.prefix import BUILD_SPACE, EXTRACTED_SPACE
from vllm_env.triton.root import NEWEST_KNOWN, TritonRoot, is_known

_GB = 10**9
# The first driver that runs CUDA 13 without a compatibility package (NVIDIA's CUDA toolkit release notes, Linux).
_DRIVER = (580, 65)
_SMI_SECONDS = 30.0  # without a persistence daemon, nvidia-smi wakes each GPU; if the driver hangs, it never ends


@dataclass(frozen=True)
class Finding:
    """The result of one check: ``state`` is ``ok``, ``warning`` or ``problem``."""

    name: str
    state: str
    what: str
    remedy: str = ""


def examine(workspace: Workspace, triton: TritonRoot | None, spec: Spec) -> list[Finding]:
    """Check everything that a build and a server need; return the findings, the most important first."""
    return [
        _triton(triton),
        _stub(triton, spec),
        _interpreter(workspace, spec),
        _gpu(spec),
        _space("cache", workspace.cache.root, BUILD_SPACE[spec.profile]),
        _space("server's /tmp", Path("/tmp"), EXTRACTED_SPACE[spec.profile]),  # noqa: S108 - hard-coded in Triton
        _shared_memory(),
        _open_files(),
        _ports(),
        _hub(),
        _compiler(spec),
    ]


def _judged(
    name: str,
    is_fine: bool,  # noqa: FBT001 - a verdict
    what: str,
    remedy: str,
    otherwise: str = "warning",
) -> Finding:
    return Finding(name, "ok", what) if is_fine else Finding(name, otherwise, what, remedy)


def _triton(triton: TritonRoot | None) -> Finding:
    if triton is None:
        return Finding(
            "Triton",
            "warning",
            "none here yet",
            "The first build provisions a CPU Triton into .triton/.",
        )
    what = f"{triton.release} in {triton.path}"
    if not is_known(triton.release):
        what = f"{what}, newer than the table of releases ({NEWEST_KNOWN})"
        return Finding("Triton", "warning", what, "The newest row is used.")
    defects = []
    if triton.rules.numpy_bound:
        defects.append("its stub cannot read NumPy 2, so the environment has 1.26")
    if triton.rules.activates is False and not triton.rules.secure_extraction:
        defects.append(
            "its extraction follows links out of the archive; verify refuses such archives"
        )
    return Finding("Triton", "ok", "; ".join([what, *defects]))


def _stub(triton: TritonRoot | None, spec: Spec) -> Finding:
    if triton is None:
        return Finding(
            "stub",
            "warning",
            "not known without a Triton",
            "Build, or name one with --triton-root.",
        )
    if spec.python in triton.stubs:
        return Finding("stub", "ok", f"Python {spec.python}: {triton.stubs[spec.python]}")
    what = f"none for Python {spec.python} (there are: {', '.join(triton.stubs) or 'none'})"
    return Finding(
        "stub",
        "warning",
        what,
        "--stub source builds one; it needs git, a compiler and access to the sources.",
    )


def _interpreter(workspace: Workspace, spec: Spec) -> Finding:
    if workspace.network.answers(remote_url()):
        return Finding("interpreter", "ok", "conda-forge answers")
    try:
        found = find_interpreter(spec.python)
    except VllmEnvError as error:
        return Finding("interpreter", "problem", f"{error.what} {error.cause}", error.remedy)
    what = (
        f"conda-forge does not answer; Python {found.version} of this machine, {found.executable}"
    )
    remedy = f"torch.compile and GPU kernels need its C headers: apt-get install libpython{spec.python}-dev."
    return _judged("interpreter", bool(found.headers), what, remedy)


def _gpu(spec: Spec) -> Finding:
    program = shutil.which("nvidia-smi")
    if program is None:
        state = "problem" if spec.profile == "cuda" else "ok"
        return Finding(
            "GPU",
            state,
            "none that this machine can use",
            "docker run needs --gpus all." if state != "ok" else "",
        )
    try:
        name, driver, capability, memory = _first_gpu(program)
    except VllmEnvError as error:
        return Finding("GPU", "problem", error.what, error.remedy)
    what = f"{name}, {memory}, driver {driver}, compute capability {capability}"
    version, compute = _numbers(driver), _numbers(capability)
    if not version or not compute:
        remedy = "Restart the machine or its driver; if that does not help, update the driver."
        return Finding(
            "GPU", "problem", f"{what}: the driver gives no number for one of these", remedy
        )
    if version < _DRIVER:
        what = f"{what}: older than CUDA 13 asks for ({'.'.join(map(str, _DRIVER))})"
        return Finding(
            "GPU",
            "warning",
            what,
            "Pin a vLLM whose torch is built for CUDA 12, or update the driver.",
        )
    if compute < (7, 5):
        what = f"{what}: wheels of torch for CUDA 13 begin with 7.5"
        return Finding("GPU", "problem", what, "Use a newer GPU, or an older vLLM.")
    return Finding("GPU", "ok", what)


def _first_gpu(program: str) -> list[str]:
    """Return name, driver, compute capability and memory of the first GPU as nvidia-smi prints them.

    Raises:
        VllmEnvError: nvidia-smi fails, hangs or names no GPU.
    """
    query = [
        program,
        "--query-gpu=name,driver_version,compute_cap,memory.total",
        "--format=csv,noheader",
    ]
    try:
        status, output = capture(query, seconds=_SMI_SECONDS)
    except CommandError as error:
        remedy = "Restart the machine, or the driver; its reason is in dmesg (grep NVRM)."
        raise VllmEnvError(
            f"{error.what} The driver hangs, or has no nvidia-smi of its own.", remedy=remedy
        ) from error
    said = " ".join(output.split())[:200] or "nothing"
    lines = [line.rsplit(",", 3) for line in output.splitlines() if line.count(",") >= 3]
    if status != 0 or not lines:
        what = (
            f"nvidia-smi fails with status {status} and"
            if status != 0
            else "nvidia-smi names no GPU; it"
        )
        raise VllmEnvError(
            f"{what} says: {said}",
            remedy="Check the driver (dmesg | grep NVRM); docker run needs --gpus all.",
        )
    return [part.strip() for part in lines[0]]


def _numbers(version: str) -> tuple[int, ...]:
    """Return a version's first two numbers; an empty tuple for a string such as "[N/A]"."""
    return (
        tuple(int(n) for n in version.split(".")[:2])
        if re.fullmatch(r"\d+(\.\d+)+", version)
        else ()
    )


def _space(name: str, folder: Path, needed: int) -> Finding:
    free = free_space(folder)
    what = f"{free / _GB:.0f} GB free in {folder}, {needed / _GB:.1f} GB are needed"
    remedy = "Free some (gen_vllm_env.sh clean), or use --layout directory, which is not extracted."
    return _judged(name, free >= needed, what, remedy, "problem")


def _shared_memory() -> Finding:
    size = shutil.disk_usage("/dev/shm").total / _GB  # noqa: S108 - where POSIX shared memory lives
    remedy = "docker run --shm-size=1g (each stub takes some, tensor parallelism more)."
    return _judged("shared memory", size >= 0.5, f"{size:.2f} GB in /dev/shm", remedy)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy = f"ulimit -n {min(hard, 65536)}: each connection takes one."
    return _judged("open files", soft >= 4096, f"limit {soft} (at most {hard})", remedy)


def _ports() -> Finding:
    taken = [port for port in (8000, 8001, 8002) if _is_taken(port)]
    what = f"taken: {', '.join(map(str, taken))}" if taken else "8000, 8001 and 8002 are free"
    return _judged(
        "ports",
        not taken,
        what,
        "Start tritonserver with --http-port, --grpc-port, --metrics-port.",
    )


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _hub() -> Finding:
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    models = len(list((home / "hub").glob("models--*")))
    token = bool(os.environ.get("HF_TOKEN")) or (home / "token").is_file()
    what = f"{models} models cached in {home}, {'a' if token else 'no'} token"
    return Finding(
        "model hub",
        "ok",
        what,
        "" if token else "Gated models need HF_TOKEN in the server's environment.",
    )


def _compiler(spec: Spec) -> Finding:
    """Check the compiler used at run time: C for launchers of GPU kernels; on a CPU, C++ for torch.compile's code."""
    if spec.profile == "cuda":
        program = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
        own = any(Requirement(text).name == "ziglang" for text in spec.requirements)
        what = program or (
            "none here; the environment brings its own"
            if own
            else "none, and the environment brings none"
        )
        return _judged(
            "C compiler",
            bool(program or own),
            what,
            "GPU kernels need one: --with ziglang, or apt-get install gcc.",
        )
    program = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    remedy = "torch.compile needs one: apt-get install g++."
    return _judged(
        "C++ compiler", bool(program), program or "none: models run eagerly (enforce_eager)", remedy
    )
