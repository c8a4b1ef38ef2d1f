"""Build a wheel of a source tree: in a copy of it, with the environment's own interpreter."""

import os
import platform
import re
import urllib.parse
import zipfile
from pathlib import Path

from vllm_env.base import report
from vllm_env.base.cache import key_of
from vllm_env.base.errors import SPACE_REMEDY, CommandError, UsageError, VllmEnvError
from vllm_env.base.filesystem import file_sha256
from vllm_env.base.machine import EPOCH
from vllm_env.base.network import NetworkError
from vllm_env.base.sources import masked
from vllm_env.base.workspace import Workspace
from vllm_env.interpreter.layer import choose_layer, install_layer

from .spec import Spec
from .tree import GIT_VARIABLES, copy_tree, tree_digest
from .wheels import fetch_wheel, keep_wheel

_LOCATION = "VLLM_PRECOMPILED_WHEEL_LOCATION"
_COMMIT = "VLLM_PRECOMPILED_WHEEL_COMMIT"
# The variables that vLLM's setup.py and CMakeLists.txt, torch's cpp_extension, setuptools-scm and
# the compilers read (0.33.0). All of vLLM's but the server's key: a fork may read one that we do
# not know.
_CHANGES_WHEEL = re.compile(
    r"VLLM_(?!ENV_|API_KEY$)\w+|\w+_SRC_DIR|FETCHCONTENT_SOURCE_DIR_\w+|ACL_ROOT_DIR|TORCH_NIGHTLY"
    r"|TORCH_CUDA_ARCH_LIST|PYTORCH_ROCM_ARCH|CUDA_(HOME|PATH|ROOT)|CUDAT?OOLKIT_ROOT|ROCM_\w+"
    r"|HIP_\w+|CMAKE_(?!BUILD_PARALLEL_LEVEL)\w+|SETUPTOOLS_SCM_\w+|CC|CXX|CUDACXX|CUDAHOSTCXX"
    r"|NVCC_(APPEND|PREPEND)_FLAGS|(C|CPP|CXX|CUDA|LD|RUST)FLAGS"
)
_TAKE_PRECOMPILED = (
    "To compile nothing, set VLLM_USE_PRECOMPILED=1 and say whose compiled parts to take: "
    f"{_LOCATION} (path or URL of a wheel) or {_COMMIT} (a commit in vLLM's wheel index)."
)
# Patterns in the output of a failed build, and what they mean.
_NO_NVCC = (
    r"CUDA_HOME (environment variable )?is not set|No CMAKE_CUDA_COMPILER|CMAKE_CUDA_COMPILER:"
    r"|[Cc]ould not find nvcc|nvcc: (command )?not found|No such file or directory: '[^']*/nvcc'"
    r"|Could NOT find CUDA|CUDA Toolkit not found"
)
_NO_COMPILER = (
    r"No CMAKE_C(XX)?_COMPILER|CMAKE_C(XX)?_COMPILER:|not able to compile a simple test program"
    r"|(gcc|g\+\+|cc|c\+\+|clang)'?: (command not found|No such file)"
)
_NO_PARTS = (
    r"Failed to fetch precompiled wheel metadata|No published precompiled wheel"
    r"|No precompiled (vllm )?wheel"
)
_NO_MEMORY = r"\bKilled\b|signal 9|SIGKILL|[Oo]ut of memory|Cannot allocate memory"
_FAILURES = (
    (
        _NO_NVCC,
        "The build compiles CUDA code, and there is no working nvcc (CUDA toolkit).",
        _TAKE_PRECOMPILED,
    ),
    (
        _NO_COMPILER,
        "There is no working C++ compiler.",
        f"Install one (apt-get install g++). {_TAKE_PRECOMPILED}",
    ),
    (
        r"unable to detect version",
        "setuptools-scm finds no version: the tree has neither a git history nor PKG-INFO.",
        "Set VLLM_VERSION_OVERRIDE, such as VLLM_VERSION_OVERRIDE=0.33.0.",
    ),
    (
        _NO_PARTS,
        "vLLM's wheel index has no compiled parts for this tree, or does not answer.",
        f"Name a wheel with {_LOCATION} (path or URL).",
    ),
    (
        _NO_MEMORY,
        "The memory of this machine was not enough.",
        f"Set MAX_JOBS=1: fewer compilers then run at once. {_TAKE_PRECOMPILED}",
    ),
    (r"No space left on device", "A file system is full.", SPACE_REMEDY),
)


def precompiled_wheel() -> str:
    """Return the URL or the absolute path of the wheel whose compiled parts the build takes, or "".

    Raises:
        UsageError: the file does not exist, or is not a wheel.
    """
    place = os.environ.get(_LOCATION, "")
    if place.startswith("file:"):
        place = urllib.parse.unquote(urllib.parse.urlsplit(place).path)
    if not place or "://" in place:
        return place
    # The build has another working folder than the user.
    file = Path(place).absolute()
    if not zipfile.is_zipfile(file):
        state = "is not a wheel" if file.exists() else "does not exist"
        raise UsageError(
            f"{_LOCATION}: {file} {state}.", remedy="Give the path or the URL of a wheel of vLLM."
        )
    return str(file)


def build_folder(workspace: Workspace, spec: Spec, *identity: str) -> Path:
    """Return the cache entry of the wheel that a build makes of a tree or commit.

    Its key has all that changes the wheel. ``identity`` is what identifies the sources.

    Raises:
        UsageError: the precompiled wheel does not exist.
    """
    variables = _variables(spec)
    location = precompiled_wheel()
    variables[_LOCATION] = location
    # The same path may have another file at the next build, so the content counts.
    precompiled = file_sha256(Path(location)) if location.startswith("/") else ""
    # So it is with a folder of sources, such as CUTLASS_SRC_DIR.
    for name, value in variables.items():
        if name.endswith("_SRC_DIR") and Path(value).is_dir():
            variables[name] = tree_digest(Path(value))
    machine = (platform.machine(), os.confstr("CS_GNU_LIBC_VERSION"))
    inputs = (identity, spec.python, spec.torch_backend, variables, precompiled, machine)
    return workspace.cache.path("wheels", key_of("built", *inputs))


def _variables(spec: Spec) -> dict[str, str]:
    """Return the variables of the build that change the wheel."""
    # vLLM's setup.py asks torch for the device. The registry's torch is the one for CUDA.
    device = {"VLLM_TARGET_DEVICE": "cpu"} if spec.profile == "cpu" else {}
    own = {name: value for name, value in os.environ.items() if _CHANGES_WHEEL.fullmatch(name)}
    return {**device, **own}


def build_wheel(
    workspace: Workspace, tree: Path, spec: Spec, folder: Path, *, commit: str, digest: str = ""
) -> Path:
    """Build a wheel of a source tree into a folder of the cache; the tree stays as it is.

    Args:
        workspace: the cache and the network.
        tree: the source tree.
        spec: the Python version and the profile of the wheel.
        folder: the cache entry, from :func:`build_folder`.
        commit: the tree's commit, if it has no changes.
        digest: the tree's digest at the time when ``folder`` was computed, if it is known.

    Raises:
        VllmEnvError: the build fails, or the tree changes meanwhile.
    """
    log = workspace.cache.path("wheel-build.log")
    with workspace.cache.staging() as staging:
        variables = _build_variables(workspace, spec, commit, staging)
        copy = staging / "vllm"
        report.step(f"copy {tree}")
        copy_tree(tree, copy)
        if digest and tree_digest(copy) != digest:
            raise VllmEnvError(
                f"{tree} changed while it was copied.", remedy="Run the same command again."
            )
        python = _install_interpreter(workspace, spec.python, staging)
        report.step(f"build a wheel of {tree}; {log} has the output")
        wheels = staging / "wheels"
        command = [
            "build", "--wheel", "--no-python-downloads", "--python", python, "--out-dir", wheels,
            copy,
        ]  # fmt: skip
        with log.open("w", encoding="utf-8") as output:
            try:
                workspace.network.uv(
                    command,
                    f"build a wheel of {tree}",
                    env=variables,
                    on_line=lambda line: print(line, file=output, flush=True),
                )
            except CommandError as error:
                raise _explained(error, tree, log) from error
        wheel = keep_wheel(wheels, folder)
    if wheel is None:
        raise VllmEnvError(
            f"The build of {tree} left no wheel.", remedy=f"{log} has its whole output."
        )
    return wheel


def _build_variables(
    workspace: Workspace, spec: Spec, commit: str, staging: Path
) -> dict[str, str]:
    """Return the variables of the build; fetch the wheel whose compiled parts it takes, if any.

    Raises:
        VllmEnvError: this wheel cannot be fetched, or is missing.
    """
    variables = {
        **_variables(spec),
        **GIT_VARIABLES,
        # The times in the wheel's ZIP. Without it, each build of the same tree would have another
        # digest.
        "SOURCE_DATE_EPOCH": str(EPOCH),
        "TMPDIR": str(staging),
        # The cache may be in a checkout: git must not take that one for the tree's.
        "GIT_CEILING_DIRECTORIES": str(staging),
    }
    location = precompiled_wheel()
    if "://" in location:
        # Fetched here: vLLM's build knows neither --offline nor pip's certificates, and fetches the
        # wheel again after each change of the tree.
        location = str(fetch_wheel(workspace, location, f"{_LOCATION} {masked(location)}"))
    elif not location and os.environ.get("VLLM_USE_PRECOMPILED", "").lower() in ("1", "true"):
        workspace.network.require(f"ask vLLM's wheel index for compiled parts ({_LOCATION})")
    variables[_LOCATION] = location
    # Without a commit, the build takes the newest precompiled wheel before this tree.
    variables.setdefault(_COMMIT, commit)
    return variables


def _install_interpreter(workspace: Workspace, python: str, staging: Path) -> Path:
    """Install the interpreter that the environment will have, and return its program."""
    layer = choose_layer(workspace, python)
    report.step(f"Python {layer.python} for the build")
    install_layer(workspace, layer, staging / "python")
    return staging / "python" / "bin" / "python"


def _explained(error: CommandError, tree: Path, log: Path) -> VllmEnvError:
    """Return the failure of a build in three sentences, without its output."""
    output = log.read_text("utf-8")
    what = f"Could not build a wheel of {tree}."
    for pattern, cause, remedy in _FAILURES:
        if re.search(pattern, output):
            return VllmEnvError(what, cause=cause, remedy=f"{remedy} The output: {log}.")
    # An error of the network has its own cause and remedy.
    cause = error.cause
    remedy = error.remedy
    if not isinstance(error, NetworkError):
        # Else the likely cause is the last exception that the build has printed.
        errors = re.findall(r"^\s*([\w.]*(?:Error|Exception)\b.*)$", output, re.MULTILINE)
        cause = cause or (f"{errors[-1].rstrip('.')}." if errors else "")
        remedy = "The tree must build, because an editable install cannot be packed."
    return VllmEnvError(what, cause=cause, remedy=f"{remedy} The output: {log}.")
