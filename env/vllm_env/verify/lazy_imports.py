"""Import modules that vLLM imports only at its first request or on a GPU, and tell broken ones from missing drivers.

Seen: two CUDA packages had overwritten each other's files. Nothing noticed it before ``import flashinfer`` on the GPU.
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
_SECONDS = 60.0  # per module; the slowest one took 4 s on two cores
_EVERYWHERE = (
    *("tokenizers", "transformers.modeling_utils", "xgrammar", "llguidance", "outlines_core"),
    *("vllm.v1.sample.*", "vllm.v1.sample.ops.*", "vllm.v1.structured_output.*"),
    *(
        "vllm.lora.*",
        "vllm.lora.layers.*",
        "vllm.multimodal.*",
        "vllm.v1.attention.backends.flex_attention",
    ),
)
# Modules of other platforms are not listed: they would fail here, and vLLM never imports them. Missing modules are skipped.
_MODULES = {
    "cpu": (
        *("vllm.v1.attention.backends.cpu_attn", "vllm.v1.attention.backends.mla.cpu_mla"),
        *(
            "vllm.v1.worker.cpu_worker",
            "vllm.v1.worker.cpu_model_runner",
            "vllm.lora.punica_wrapper.punica_cpu",
        ),
    ),
    "cuda": (
        *(
            "cuda.bindings.runtime",
            "cuda.bindings.driver",
            "triton.runtime.build",
            "triton.backends.nvidia.driver",
        ),
        *(
            "flashinfer",
            "flashinfer.sampling",
            "flashinfer.decode",
            "flashinfer.prefill",
            "deep_gemm",
            "vllm.vllm_flash_attn",
        ),
        *(
            f"vllm.v1.attention.backends.{name}_attn"
            for name in ("flash", "triton", "gdn", "linear", "mamba1", "mamba2")
        ),
        "vllm.v1.attention.backends.flashinfer",
        *(
            f"vllm.v1.attention.backends.mla.{name}mla"
            for name in ("flash", "triton_", "flashinfer_", "flashattn_", "cutlass_")
        ),
        *(
            "vllm.v1.worker.gpu_worker",
            "vllm.v1.worker.gpu_model_runner",
            "vllm.lora.punica_wrapper.punica_gpu",
        ),
    ),
}
# Messages of torch, Triton, NVML and cuda.bindings without a driver or a device, also with the stand-in.
_NO_DEVICE = re.compile(
    r"no NVIDIA driver|No CUDA GPUs|no CUDA-capable device|no NVIDIA GPU|CUDA driver version is insufficient|"
    r"cudaErrorNoDevice|CUDA_ERROR_NO_DEVICE|NVMLError_|NVML Shared Library Not Found|0 active drivers|"
    r"Cannot re-initialize CUDA in forked|lib(cuda|nvidia-ml)\.so\.1: cannot open",
    re.IGNORECASE,
)


def check_lazy_imports(
    workspace: Workspace, environment: Path, expected: Expected, seconds: float = _SECONDS
) -> tuple[str, ...]:
    """Import the modules that vLLM imports after its start on the profile's platform, with Triton's way to start.

    Returns:
        Notes for the user: modules that took longer than ``seconds``, so that the result is unknown.

    Raises:
        VllmEnvError: a module is broken. A missing driver, or a missing package that is not in the lock, is not an error.
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
    return (
        (f"not told in {seconds:.0f} s whether these can be imported: {', '.join(slow)}",)
        if slow
        else ()
    )


def import_each(
    workspace: Workspace,
    environment: Path,
    modules: tuple[str, ...],
    expected: Expected,
    seconds: float,
) -> dict[str, dict[str, Any]]:
    """Import modules one after another, each within ``seconds``, in forked processes; return the failures by module.

    A failure has ``text``, ``place`` (file and line), ``absent`` (the missing module) and ``owners`` (distributions that
    have such a module), or only ``slow``.

    Raises:
        CommandError: the interpreter does not start, or the modules that vLLM imports first end it.
    """
    with workspace.cache.staging() as scratch:
        variables = {"HOME": str(scratch)}
        if expected.profile == "cuda":
            if not write_driver_standin(environment, scratch):
                report.note(
                    "there is no C compiler (add ziglang to the spec): what needs a driver is not imported"
                )
                modules = tuple(name for name in modules if name in _EVERYWHERE)
            # vLLM takes an empty list as a device that comes later. Triton's kernels are then defined as on a GPU.
            variables |= {"LD_LIBRARY_PATH": str(scratch), "CUDA_VISIBLE_DEVICES": ""}
        activates, what = (
            rules_of(expected.release).activates,
            "import what vLLM imports after its start",
        )
        question = {"profile": expected.profile, "modules": modules, "seconds": seconds}
        answers = ask(environment, _PROBE, question, variables, activates=activates, what=what)
    return {name: failure for name, failure in answers.items() if failure}


def is_broken(failure: Mapping[str, Any], versions: Mapping[str, str]) -> bool:
    """Return whether a failed import would also fail on a GPU with the locked packages (``versions``)."""
    if absent := failure["absent"]:
        return "." not in absent and any(
            canonicalize_name(owner) in versions for owner in failure["owners"]
        )
    return not _NO_DEVICE.search(failure["text"])


def _error(broken: Mapping[str, Mapping[str, Any]], environment: Path) -> VllmEnvError:
    (name, first), *others = broken.items()
    more = (
        f" (nor {', '.join(other for other, _ in others[:3])}{' …' if len(others) > 3 else ''})"
        if others
        else ""
    )
    place = first["place"].removeprefix(f"{environment}/")
    return VllmEnvError(
        f"vLLM will not be able to import {name}{more}: {first['text']}{place and f' ({place})'}.",
        cause="It is not for want of a driver or a GPU: a package there is damaged, or does not go with another one's version.",
        remedy="Pin another version of the package that the message names (--with PACKAGE==VERSION), or of vLLM.",
    )
