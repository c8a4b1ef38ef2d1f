"""Choose how vLLM compiles at run time: with the container's compilers, the environment's own, or not at all.

On a GPU, Triton's kernel compiler compiles a launcher in C for each kernel
(triton/runtime/build.py: CC, gcc or clang). So it needs a C compiler even with enforce_eager.

FlashInfer compiles its sampler at the first request that samples. It needs nvcc and a C++ compiler.
vLLM does not look for them when it chooses that sampler: it looks only at the GPU.

On a CPU, torch.compile needs a C++ compiler.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

OWN = "vllm-env-cc"
"""The environment's own C compiler, next to its interpreter."""
_EAGER = ("enforce_eager", "compilation_config")


@dataclass(frozen=True)
class Compilers:
    """How to start vLLM where the operator has not chosen.

    Attributes:
        arguments: engine arguments to add.
        variables: environment variables to set.
        notes: lines for the log.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def choose(
    engine_args: Mapping[str, Any], environment: Mapping[str, str], prefix: Path, *, on_cpu: bool
) -> Compilers:
    """Return the settings that avoid every compiler that is missing.

    Args:
        engine_args: the operator's arguments. A choice between eager and compiled execution is kept.
        environment: the process's variables. CC, CXX and VLLM_USE_FLASHINFER_SAMPLER are kept.
        prefix: the environment's folder.
        on_cpu: whether vLLM runs on a CPU.
    """
    path = environment.get("PATH", os.defpath)
    has_cpp = "CXX" in environment or any(
        shutil.which(name, path=path) for name in ("g++", "clang++", "c++")
    )
    if on_cpu:
        # The C++ code that torch.compile writes includes Python.h.
        has_headers = Path(sysconfig.get_path("include"), "Python.h").is_file()
        if (has_cpp and has_headers) or any(name in engine_args for name in _EAGER):
            return Compilers()
        return Compilers(
            {"enforce_eager": True},
            {},
            ("no C++ compiler or no Python.h here: models run eagerly (enforce_eager)",),
        )
    variables: dict[str, str] = {}
    notes = []
    if "CC" not in environment and not any(
        shutil.which(name, path=path) for name in ("gcc", "clang")
    ):
        own = prefix / "bin" / OWN
        if own.is_file():
            variables["CC"] = str(own)
            notes.append(
                f"no C compiler here: GPU kernels are compiled with the environment's own, CC={own}"
            )
        else:
            notes.append(
                "no C compiler here, which GPU kernels need: install gcc, or build with --with ziglang"
            )
    if "VLLM_USE_FLASHINFER_SAMPLER" not in environment and not (
        has_cpp and _has_nvcc(environment, path)
    ):
        variables["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
        notes.append(
            "no CUDA toolkit with a C++ compiler here: FlashInfer's sampler, which compiles itself, is off"
        )
    return Compilers({}, variables, tuple(notes))


def _has_nvcc(environment: Mapping[str, str], path: str) -> bool:
    """Return whether FlashInfer would find nvcc; it looks in CUDA_HOME, on PATH and in the default folder, in this order."""
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    if home:
        return (Path(home) / "bin" / "nvcc").is_file()
    return shutil.which("nvcc", path=path) is not None or Path("/usr/local/cuda/bin/nvcc").is_file()
