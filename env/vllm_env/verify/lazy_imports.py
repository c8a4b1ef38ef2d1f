"""Imports what vLLM imports only at its first request, or on a GPU, and tells a missing driver from what is broken.

Seen: files of two CUDA packages over each other, which nothing noticed before ``import flashinfer`` on the GPU.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from vllm_env import inside
from vllm_env.base import report
from vllm_env.base.errors import VllmEnvError
from vllm_env.base.workspace import Workspace
from vllm_env.triton.root import rules_of

from .driver_standin import write_driver_standin
from .launcher_check import ask
from .tree_rules import Expected

_PROBE = inside.FOLDER / "lazy_probe.py"
_SECONDS = 60.0  # the slowest one took 4 s on two cores
_EVERYWHERE = (
    *("tokenizers", "transformers.modeling_utils", "xgrammar", "llguidance", "outlines_core"),
    *("vllm.v1.sample.*", "vllm.v1.sample.ops.*", "vllm.v1.structured_output.*"),
    *("vllm.lora.*", "vllm.lora.layers.*", "vllm.multimodal.*", "vllm.v1.attention.backends.flex_attention"),
)
# Those of other platforms are not asked for: they fail here, and are never imported. What this vLLM lacks is passed over.
_MODULES = {
    "cpu": (
        *("vllm.v1.attention.backends.cpu_attn", "vllm.v1.attention.backends.mla.cpu_mla"),
        *("vllm.v1.worker.cpu_worker", "vllm.v1.worker.cpu_model_runner", "vllm.lora.punica_wrapper.punica_cpu"),
    ),
    "cuda": (
        *("cuda.bindings.runtime", "cuda.bindings.driver", "triton.runtime.build", "triton.backends.nvidia.driver"),
        *("flashinfer", "flashinfer.sampling", "flashinfer.decode", "flashinfer.prefill", "deep_gemm", "vllm.vllm_flash_attn"),
        *(f"vllm.v1.attention.backends.{name}_attn" for name in ("flash", "triton", "gdn", "linear", "mamba1", "mamba2")),
        "vllm.v1.attention.backends.flashinfer",
        *(f"vllm.v1.attention.backends.mla.{name}mla" for name in ("flash", "triton_", "flashinfer_", "flashattn_", "cutlass_")),
        *("vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu_model_runner", "vllm.lora.punica_wrapper.punica_gpu"),
    ),
}
# What torch, Triton, NVML and cuda.bindings say without a driver or a device, also behind the stand-in.
_NO_DEVICE = re.compile(
    r"no NVIDIA driver|No CUDA GPUs|no CUDA-capable device|no NVIDIA GPU|CUDA driver version is insufficient|"
    r"cudaErrorNoDevice|CUDA_ERROR_NO_DEVICE|NVMLError_|NVML Shared Library Not Found|0 active drivers|"
    r"Cannot re-initialize CUDA in forked|lib(cuda|nvidia-ml)\.so\.1: cannot open",
    re.IGNORECASE,
)


def check_lazy_imports(workspace: Workspace, environment: Path, expected: Expected, seconds: float = _SECONDS) -> tuple[str, ...]:
    """Import what vLLM imports after its start on the profile's platform, as Triton starts it; each may take ``seconds``.

    Returns:
        Notes for the user: which modules took too long to tell.

    Raises:
        VllmEnvError: a module is broken; one that lacks a driver, or a package that is not in the lock, is not.
    """
    modules = (*_MODULES.get(expected.profile, ()), *_EVERYWHERE)
    failures = import_each(workspace, environment, modules, expected, seconds)
    broken, slow = {}, []
    for name, failure in failures.items():
        if failure.get("slow"):
            slow.append(name)
        elif is_broken(failure, expected.versions):
            broken[name] = failure
        else:
            report.debug(f"{name}: {failure['text']}")
    if broken:
        raise _error(broken, environment)
    return (f"not told in {seconds:.0f} s whether these can be imported: {', '.join(slow)}",) if slow else ()


def import_each(
    workspace: Workspace, environment: Path, modules: tuple[str, ...], expected: Expected, seconds: float
) -> dict[str, dict[str, Any]]:
    """Import each of some modules in a process that may take ``seconds``; return the failures by module.

    A failure has ``text``, ``place`` (file and line), ``absent`` (the module that there is not) and ``owners`` (distributions
    that have such a module), or is only ``slow``.

    Raises:
        CommandError: the interpreter does not start, or ends with what vLLM imports first.
    """
    with workspace.cache.staging() as scratch:
        variables = {"HOME": str(scratch)}
        if expected.profile == "cuda":
            if not write_driver_standin(environment, scratch):
                report.note("there is no C compiler (add ziglang to the spec): what needs a driver is not imported")
                modules = tuple(name for name in modules if name in _EVERYWHERE)
            # vLLM takes an empty list for a device that comes later, and Triton's kernels are then what they are on a GPU
            variables |= {"LD_LIBRARY_PATH": str(scratch), "CUDA_VISIBLE_DEVICES": ""}
        activates, what = rules_of(expected.release).activates, "import what vLLM imports after its start"
        question = {"profile": expected.profile, "modules": modules, "seconds": seconds}
        answers = ask(environment, _PROBE, question, variables, activates=activates, what=what)
    return {name: failure for name, failure in answers.items() if failure}


def is_broken(failure: Mapping[str, Any], versions: Mapping[str, str]) -> bool:
    """Tell whether a failed import would fail on a GPU as well, with what the lock has (``versions``)."""
    if absent := failure["absent"]:
        return "." not in absent and any(canonicalize_name(owner) in versions for owner in failure["owners"])
    return not _NO_DEVICE.search(failure["text"])


def _error(broken: Mapping[str, Mapping[str, Any]], environment: Path) -> VllmEnvError:
    (name, first), *others = broken.items()
    more = f" (nor {', '.join(other for other, _ in others[:3])}{' …' if len(others) > 3 else ''})" if others else ""
    place = first["place"].removeprefix(f"{environment}/")
    return VllmEnvError(
        f"vLLM will not be able to import {name}{more}: {first['text']}{place and f' ({place})'}.",
        cause="It is not for want of a driver or a GPU: a package there is damaged, or does not go with another one's version.",
        remedy="Pin another version of the package that the message names (--with PACKAGE==VERSION), or of vLLM.",
    )
