"""What the installed vLLM says of itself and of the machine: variables, devices, metrics."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from triton_vllm.base.protocols import PrometheusFamily


def variables() -> Collection[str]:
    """Return the environment variables that this vLLM reads; it warns of others of its names, or refuses them."""
    known: Mapping[str, Any] = getattr(importlib.import_module("vllm.envs"), "environment_variables", {})
    return known.keys()


def child_environment() -> dict[str, str]:
    """Return variables that vLLM's processes need, unless the operator has set them.

    On CPU vLLM compiles the ranks of log probabilities with a C++ compiler at the first request that asks for them;
    without one, or without torch's headers, the engine dies. With this it goes on uncompiled. Headers are not compiled ahead:
    torch does that anew in each container, also where all that it compiles is cached, and it took 6 s of a start of 20.
    """
    if not runs_on_cpu():
        return {}
    return {"TORCHDYNAMO_SUPPRESS_ERRORS": "1", "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}


def runs_on_cpu() -> bool:
    """Return whether this vLLM computes on the CPU."""
    return bool(importlib.import_module("vllm.platforms").current_platform.is_cpu())


def supports_ray() -> bool:
    """Return whether this vLLM's platform can have workers in a Ray cluster; its CPU platform cannot.

    vLLM itself checks that in EngineCore, whose error is written to the log only.
    """
    platform = importlib.import_module("vllm.platforms").current_platform
    return bool(getattr(platform, "ray_device_key", "not said"))


def prometheus_families() -> Iterable[PrometheusFamily]:
    """Return what vLLM and others have in this process's Prometheus registry."""
    from prometheus_client import REGISTRY

    families: Iterable[PrometheusFamily] = REGISTRY.collect()
    return families
