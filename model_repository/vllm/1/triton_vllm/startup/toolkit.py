"""Keep vLLM from kernels that it would compile with a CUDA toolkit where there is none.

FlashInfer and DeepGEMM compile with nvcc when the model is loaded or at a first request. vLLM has
both on by default. Where nothing can compile, the load fails.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triton_vllm.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, MutableMapping

    from triton_vllm.base.protocols import Log


@dataclass(frozen=True)
class Switch:
    """A variable of vLLM that turns off kernels which would be compiled here.

    Attributes:
        variable: the variable; "0" turns them off.
        library: what compiles them.
        since: the first vLLM that is known to read the variable.
        needed_by: the models that need the switch.
        cost: what takes the kernels' place, for the log.
        seen: how the need was seen.
        until: when the entry may go.
        slow: whether compiling takes minutes. Then they are off where a toolkit is, too.
    """

    variable: str
    library: str
    since: str
    needed_by: str
    cost: str
    seen: str
    until: str
    slow: bool = False


SWITCHES = (
    Switch(
        variable="VLLM_USE_FLASHINFER_SAMPLER",
        library="flashinfer",
        since="0.11",
        needed_by="all that generate, at the first request with top_p or top_k",
        cost="vLLM's own sampler takes the place of FlashInfer's, which compiles for minutes",
        seen="0.32.0, H200: 'Could not find nvcc'; with a toolkit and 16 cores more than 105 s",
        until="FlashInfer's compiled kernels for vLLM's pin are on the registry",
        slow=True,
    ),
    Switch(
        variable="VLLM_USE_DEEP_GEMM",
        library="deep_gemm",
        since="0.11",
        needed_by="FP8 in blocks of 128 x 128, dense and MoE (Qwen3-FP8, DeepSeek-V3)",
        cost="models with FP8 in blocks use vLLM's other kernels",
        seen="0.33.0, H200: 'not home_path.empty()' ends the load; with 0, both load and answer",
        until="vLLM asks whether DeepGEMM can compile, or DeepGEMM brings its kernels compiled",
    ),
    Switch(
        variable="VLLM_ALLREDUCE_USE_FLASHINFER",
        library="flashinfer",
        since="0.17",
        needed_by="tensor_parallel_size above 1; on by default since 0.29",
        cost="tensor parallelism uses vLLM's own all-reduce and NCCL",
        seen="0.33.0, two H200: 'Could not find nvcc' ends the load; with 0, it loads in 63 s",
        until="FlashInfer's all-reduce asks has_flashinfer() first, as other parts of vLLM do",
    ),
)
_CPP_COMPILERS = ("g++", "c++", "clang++")
# FlashInfer's kernels, compiled. Nobody publishes them for vLLM's pin today.
_COMPILED_KERNELS = "flashinfer_jit_cache"
_TOOLKIT = "CUDA toolkit (nvcc, and a C++ compiler)"


def switch_off(environment: MutableMapping[str, str], log: Log) -> None:
    """Set the variables that turn off what cannot be compiled here, or takes minutes.

    Call it before vLLM is imported: some of its modules read variables only then.

    Args:
        environment: the process's variables; changed. What the operator has set stays.
        log: reports what is off, and what takes its place.
    """
    off = [switch for switch in SWITCHES if _applies(switch, environment)]
    if not off:
        return
    environment.update({switch.variable: "0" for switch in off})
    why = "takes minutes to compile" if has_toolkit(environment) else f"needs a {_TOOLKIT}"
    shown = "; ".join(f"{switch.variable}=0: {switch.cost}" for switch in off)
    log.info(f"off, because it {why}: {shown} (with the value 1, vLLM compiles)")


def _applies(switch: Switch, environment: Mapping[str, str]) -> bool:
    """Return whether a switch's kernels must be off here, and the operator has not decided."""
    if switch.variable in environment or not _is_installed(switch.library):
        return False
    # vLLM warns of a variable that it does not know.
    envs = _path_in_vllm("envs.py")
    if envs.is_file() and f'"{switch.variable}"' not in envs.read_text(encoding="utf-8"):
        return False
    return switch.slow or not _can_compile(switch.library, environment)


def refuse(engine_args: Mapping[str, Any], environment: Mapping[str, str], file: str) -> None:
    """Refuse an attention backend that the operator has chosen and that cannot be compiled here.

    Args:
        engine_args: the operator's arguments, as the file has them.
        environment: the process's variables.
        file: the file's name in errors.

    Raises:
        ConfigError: names the argument, and what to change.
    """
    if not _is_installed("flashinfer") or _can_compile("flashinfer", environment):
        return
    for name, backend in _attention_backends(engine_args):
        # Also FLASHINFER_MLA, and the path of a backend's class, which vLLM takes, too.
        if "FLASHINFER" in str(backend).upper():
            raise ConfigError(
                f"{file}: {name}: {backend} is compiled when the model is loaded, which needs a "
                f"{_TOOLKIT}, and there is none here; leave it out, so that vLLM chooses a "
                "backend, or serve where a toolkit is and set CUDA_HOME"
            )


def _attention_backends(engine_args: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each argument for an attention backend: its name in errors, and its value or None."""
    yield "attention_backend", engine_args.get("attention_backend")
    config = _object_of(engine_args.get("attention_config"))
    for field in ("backend", "mla_prefill_backend"):
        yield f"attention_config: {field}", config.get(field)
    for kind, backend in _object_of(config.get("backend_per_kind")).items():
        yield f"attention_config: backend_per_kind: {kind}", backend
    draft = _object_of(engine_args.get("speculative_config"))
    yield "speculative_config: attention_backend", draft.get("attention_backend")


def _object_of(value: Any) -> Mapping[str, Any]:
    """Return an argument that is an object; empty if it is something else, which vLLM refuses."""
    # As everywhere in the file, an object may be a string of JSON.
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return value if isinstance(value, dict) else {}


def has_toolkit(environment: Mapping[str, str]) -> bool:
    """Return whether FlashInfer and DeepGEMM find nvcc, and nvcc a C++ compiler."""
    # vLLM asks in the same order (utils/flashinfer.py).
    path = environment.get("PATH", os.defpath)
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    if home:
        nvcc = shutil.which(os.path.join(home, "bin", "nvcc"))  # noqa: PTH118
    else:
        nvcc = shutil.which("nvcc", path=path) or shutil.which("/usr/local/cuda/bin/nvcc")
    has_cpp = "CXX" in environment or any(shutil.which(name, path=path) for name in _CPP_COMPILERS)
    return nvcc is not None and has_cpp


def _can_compile(library: str, environment: Mapping[str, str]) -> bool:
    """Return whether a library's kernels can be compiled here, or are there already."""
    if library == "flashinfer" and _is_installed(_COMPILED_KERNELS):
        return True
    return has_toolkit(environment)


def _is_installed(library: str) -> bool:
    if importlib.util.find_spec(library) is not None:
        return True
    # vLLM brings its own copy of DeepGEMM.
    return _path_in_vllm(f"third_party/{library}").is_dir()


def _path_in_vllm(path: str) -> Path:
    """Return a path in vLLM's package, which is not imported."""
    spec = importlib.util.find_spec("vllm")
    folders = spec.submodule_search_locations if spec else None
    return Path(folders[0] if folders else "vllm", path)
