"""Read what the installed vLLM says about itself and the machine: variables, devices, metrics."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, MutableMapping

    from triton_vllm.base.protocols import PrometheusFamily
    from triton_vllm.vllm_api.names import Vllm

THREADS_VARIABLE = "OMP_NUM_THREADS"


def variables() -> Collection[str]:
    """Return the environment variables that this vLLM reads.

    It warns of other variables with its prefix, or refuses them.
    """
    # The values are functions that read the variables. We do not call them: vLLM itself reports a
    # wrong value of a variable that it needs.
    envs = importlib.import_module("vllm.envs")
    known: Mapping[str, Any] = getattr(envs, "environment_variables", {})
    return known.keys()


def child_environment() -> dict[str, str]:
    """Return variables that vLLM's processes need, unless the operator has set them."""
    # On a GPU, an error of the compiler must not be hidden.
    if not runs_on_cpu():
        return {}
    return {
        # On a CPU, vLLM compiles the ranks of log probabilities with a C++ compiler when a request
        # first asks for them. Without a compiler or torch's headers, the engine dies. With this
        # variable it continues without compiling.
        "TORCHDYNAMO_SUPPRESS_ERRORS": "1",
        # This stops torch from compiling headers ahead. torch does that again in each container,
        # even if all that it compiles is cached. It took 6 s of a start of 20 s.
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
        # Which vector instructions the processor has, torch then takes from /proc/cpuinfo.
        # Otherwise it also compiles and loads a file for each kind: 6 s of the first start on a
        # machine.
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
    }


def limit_threads(vllm: Vllm, environment: MutableMapping[str, str]) -> None:
    """Let Torch compute with one CPU thread in this process and in an EngineCore that it starts.

    If the operator has chosen a number, this does nothing. On a CPU, the engine computes with
    Torch's threads, so they stay.
    """
    # vLLM 0.32 and newer do so themselves once the model is loaded. Older ones do so only in
    # workers that are separate processes, and before the load. With a thread for each of 64 cores,
    # a list of 100,000 token ids stopped all other requests for 1.2 s instead of 0.2 s.
    if vllm.limits_threads or runs_on_cpu() or environment.get(THREADS_VARIABLE):
        return
    # A spawned EngineCore reads the variable, and a forked one inherits Torch's own setting.
    environment[THREADS_VARIABLE] = "1"
    importlib.import_module("torch").set_num_threads(1)


def runs_on_cpu() -> bool:
    """Return whether this vLLM computes on the CPU."""
    return bool(importlib.import_module("vllm.platforms").current_platform.is_cpu())


def supports_ray() -> bool:
    """Return whether this vLLM's platform supports workers in a Ray cluster."""
    # Its CPU platform does not. vLLM itself checks that in EngineCore, and its error is only in the
    # log.
    platform = importlib.import_module("vllm.platforms").current_platform
    return bool(getattr(platform, "ray_device_key", "unknown"))


def prometheus_families() -> Iterable[PrometheusFamily]:
    """Return everything in this process's Prometheus registry, by vLLM and others."""
    from prometheus_client import REGISTRY

    families: Iterable[PrometheusFamily] = REGISTRY.collect()
    return families


def devices_compute() -> bool:
    """Return whether a GPU of this machine computes, or may compute; it takes a millisecond."""
    if runs_on_cpu():
        return False
    try:
        nvml = importlib.import_module("vllm.third_party.pynvml")
        nvml.nvmlInit()
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        return any(nvml.nvmlDeviceGetUtilizationRates(handle).gpu > 0 for handle in handles)
    # A GPU of another maker, or one that does not say.
    except Exception:  # noqa: BLE001
        return True
