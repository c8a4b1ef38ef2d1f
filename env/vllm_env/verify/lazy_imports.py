"""Import vLLM, and then the modules that it imports only at its first request or on a GPU.

One process does both: an import of vLLM takes 6 s of a core. A later module that fails is broken,
or it misses a driver or a package that it can do without.
"""
# Seen: two CUDA packages had overwritten each other's files. Nothing noticed it before
# ``import flashinfer`` on the GPU.

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from vllm_env.base import report
from vllm_env.base.errors import VllmEnvError
from vllm_env.base.workspace import Workspace

from .driver_standin import write_driver_standin
from .launcher_check import Later, check_start
from .tree_rules import Expected

# Per module. The slowest one took 4 s on two cores.
_IMPORT_SECONDS = 60.0
# The modules of each profile. Those of other platforms are not listed: they would fail here, and
# vLLM never imports them. Missing modules are skipped.
_EVERYWHERE = (
    "tokenizers",
    "transformers.modeling_utils",
    "xgrammar",
    "llguidance",
    "outlines_core",
    "vllm.v1.sample.*",
    "vllm.v1.sample.ops.*",
    "vllm.v1.structured_output.*",
    "vllm.lora.*",
    "vllm.lora.layers.*",
    "vllm.multimodal.*",
    "vllm.v1.attention.backends.flex_attention",
)
_MODULES = {
    "cpu": (
        "vllm.v1.attention.backends.cpu_attn",
        "vllm.v1.attention.backends.mla.cpu_mla",
        "vllm.v1.worker.cpu_worker",
        "vllm.v1.worker.cpu_model_runner",
        "vllm.lora.punica_wrapper.punica_cpu",
    ),
    "cuda": (
        "cuda.bindings.runtime",
        "cuda.bindings.driver",
        "triton.runtime.build",
        "triton.backends.nvidia.driver",
        "flashinfer",
        "flashinfer.sampling",
        "flashinfer.decode",
        "flashinfer.prefill",
        "deep_gemm",
        "vllm.vllm_flash_attn",
        "vllm.v1.attention.backends.flash_attn",
        "vllm.v1.attention.backends.triton_attn",
        "vllm.v1.attention.backends.gdn_attn",
        "vllm.v1.attention.backends.linear_attn",
        "vllm.v1.attention.backends.mamba1_attn",
        "vllm.v1.attention.backends.mamba2_attn",
        "vllm.v1.attention.backends.flashinfer",
        "vllm.v1.attention.backends.mla.flashmla",
        "vllm.v1.attention.backends.mla.triton_mla",
        "vllm.v1.attention.backends.mla.flashinfer_mla",
        "vllm.v1.attention.backends.mla.flashattn_mla",
        "vllm.v1.attention.backends.mla.cutlass_mla",
        "vllm.v1.worker.gpu_worker",
        "vllm.v1.worker.gpu_model_runner",
        "vllm.lora.punica_wrapper.punica_gpu",
    ),
}
# Messages of torch, Triton, NVML and cuda.bindings without a driver or a device, also with the
# stand-in.
_NO_DEVICE = re.compile(
    r"no NVIDIA driver|No CUDA GPUs|no CUDA-capable device|no NVIDIA GPU|"
    r"CUDA driver version is insufficient|cudaErrorNoDevice|CUDA_ERROR_NO_DEVICE|NVMLError_|"
    r"NVML Shared Library Not Found|0 active drivers|Cannot re-initialize CUDA in forked|"
    r"lib(cuda|nvidia-ml)\.so\.1: cannot open",
    re.IGNORECASE,
)


def check_imports(
    workspace: Workspace, environment: Path, expected: Expected, seconds: float = _IMPORT_SECONDS
) -> tuple[str, ...]:
    """Import vLLM as the release's launcher would, then the modules that vLLM imports later.

    Args:
        workspace: the cache.
        environment: the unpacked environment.
        expected: its profile, and the Triton release that starts it.
        seconds: the time for each module.

    Returns:
        Notes for the user: modules without bytecode, and modules that took longer, so that the
        result is unknown.

    Raises:
        VllmEnvError: the environment does not start, or a module is broken. A missing driver, or a
            missing package that is not in the lock, is not an error.
    """
    with later_imports(workspace, environment, expected, seconds) as later:
        started = check_start(workspace, environment, expected, later)
    notes = judge_failures(started.failures, environment, expected.versions)
    # Modules that each start compiles again.
    if started.stale:
        names = ", ".join(started.stale[:3])
        modules = f"{len(started.stale)} of {len(started.files)} modules"
        notes = (f"{modules} have no bytecode that fits ({names}, …): slower starts", *notes)
    return notes


@contextlib.contextmanager
def later_imports(
    workspace: Workspace,
    environment: Path,
    expected: Expected,
    seconds: float = _IMPORT_SECONDS,
    modules: tuple[str, ...] | None = None,
) -> Iterator[Later]:
    """Yield the modules to try after vLLM's start, and how an interpreter must import them.

    For ``cuda``, the interpreter gets a stand-in of the driver, which lasts until the block ends.

    Args:
        workspace: the cache.
        environment: the unpacked environment.
        expected: its profile.
        seconds: the time for each module.
        modules: their names; None for all that vLLM imports later with this profile.
    """
    profile = expected.profile
    names = (*_MODULES.get(profile, ()), *_EVERYWHERE) if modules is None else modules
    if profile != "cuda":
        yield Later(as_cuda=False, modules=names, seconds=seconds)
        return
    with workspace.cache.staging() as scratch:
        # Without the stand-in, a missing driver and a broken package look the same.
        if not write_driver_standin(environment, scratch):
            report.note(
                "there is no C compiler (add ziglang to the spec): "
                "modules that need a driver are not imported"
            )
            # These need no driver.
            names = tuple(name for name in names if name in _EVERYWHERE)
        # vLLM takes an empty list as a device that comes later. Triton's kernels are then defined
        # as on a GPU.
        variables = {"LD_LIBRARY_PATH": str(scratch), "CUDA_VISIBLE_DEVICES": ""}
        yield Later(as_cuda=True, modules=names, seconds=seconds, variables=variables)


def judge_failures(
    failures: Mapping[str, Mapping[str, Any]], environment: Path, versions: Mapping[str, str]
) -> tuple[str, ...]:
    """Return notes for the user about imports whose result is unknown.

    Args:
        failures: as in ``Started``.
        environment: the unpacked environment.
        versions: the locked versions by normalised name.

    Raises:
        VllmEnvError: a module is broken.
    """
    broken = {}
    slow = []
    for name, failure in failures.items():
        if failure.get("slow"):
            slow.append(name)
        elif is_broken(failure, versions):
            broken[name] = failure
        else:
            report.debug(f"{name}: {failure['text']}")
    if broken:
        raise _broken_error(broken, environment)
    if not slow:
        return ()
    return (f"these imports took too long to be checked: {', '.join(slow)}",)


def is_broken(failure: Mapping[str, Any], versions: Mapping[str, str]) -> bool:
    """Return whether a failed import would also fail on a GPU with the locked packages."""
    missing = failure["absent"]
    if not missing:
        return not _NO_DEVICE.search(failure["text"])
    # A package that the lock does not have is optional.
    is_locked = any(canonicalize_name(owner) in versions for owner in failure["owners"])
    # A name with a dot is a module of the list that this version of its package does not have.
    is_whole_package = "." not in missing
    return is_locked and is_whole_package


def _broken_error(broken: Mapping[str, Mapping[str, Any]], environment: Path) -> VllmEnvError:
    """Return the error for broken modules, which shows the first one's failure.

    Args:
        broken: the failures by module, as in ``Started``.
        environment: the unpacked environment.
    """
    name, *others = broken
    failure = broken[name]
    place = failure["place"].removeprefix(f"{environment}/")
    also = ", ".join(others[:3]) + (" …" if len(others) > 3 else "")
    what = f"{name} (nor {also})" if others else name
    where = f" ({place})" if place else ""
    return VllmEnvError(
        f"vLLM will not be able to import {what}: {failure['text']}{where}.",
        cause=(
            "A missing driver or GPU is not the reason: "
            "a package is damaged, or does not fit the version of another one."
        ),
        remedy=(
            "Pin another version of the package that the message names "
            "(--with PACKAGE==VERSION), or of vLLM."
        ),
    )
