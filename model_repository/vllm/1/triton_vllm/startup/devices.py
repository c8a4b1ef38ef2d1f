"""Choose the GPUs of an instance before vLLM is imported."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from triton_vllm.base.coerce import to_int
from triton_vllm.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
_MASTER_PORT = 29501
"""vLLM's default of the engine argument ``master_port``."""
_FOR_SEVERAL_MACHINES = (
    "data_parallel_address",
    "data_parallel_external_lb",
    "data_parallel_hybrid_lb",
    "data_parallel_rank",
    "data_parallel_size_local",
)
"""Engine arguments of an engine whose ranks may be on several machines."""


def visible(
    kind: str,
    device_id: int,
    gpu_ids: tuple[int, ...],
    engine_args: Mapping[str, Any],
    environment: Mapping[str, str],
) -> str | None:
    """Return the value for CUDA_VISIBLE_DEVICES, or None to leave it as it is.

    Args:
        kind: Triton's instance kind. CPU, GPU or MODEL.
        device_id: the GPU that Triton assigned to a KIND_GPU instance. Counted among those that the
            server sees.
        gpu_ids: GPU_DEVICE_IDS.
        engine_args: the tensor, pipeline and data parallel sizes are read.
        environment: the process's variables.

    Raises:
        ConfigError: the parallel sizes do not fit the instance kind or the GPUs.
    """
    sizes = parallel_sizes(engine_args)
    # "world size" is PyTorch's name for the number of processes. Here each has one GPU.
    world = math.prod(sizes.values())
    if kind == "GPU":
        if world > 1:
            # the official backend's message
            raise ConfigError(
                "KIND_GPU is currently for single-GPU models, "
                "please specify KIND_MODEL in the model's config.pbtxt for multi-GPU models"
            )
        if gpu_ids:
            raise ConfigError(
                "GPU_DEVICE_IDS is for KIND_MODEL; "
                "with KIND_GPU, list the GPUs in instance_group.gpus"
            )
        if device_id < 0:
            return None
        return _device_name(environment.get(DEVICES_VARIABLE, ""), device_id)
    if kind != "MODEL" or not gpu_ids:
        return None
    # GPU_DEVICE_IDS has the GPUs of one machine. Each machine uses the same number.
    machine_count = machines(engine_args)
    is_complete = len(gpu_ids) * machine_count == world
    # As in the official backend, one worker under Ray may be given any number.
    may_differ = world == 1 and engine_args.get("distributed_executor_backend") == "ray"
    if not is_complete and not may_differ:
        shown = " * ".join(f"{name}_parallel_size({size})" for name, size in sizes.items())
        given = f"{len(gpu_ids)}"
        if machine_count > 1:
            given = f"{given} for each of {machine_count} machines"
        raise ConfigError(
            "The number of GPU IDs specified in GPU_DEVICE_IDS parameter must match "
            f"the total parallelism world size ({shown} = {world}), and it has {given}."
        )
    return ",".join(map(str, gpu_ids))


def parallel_sizes(engine_args: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of tensor, pipeline and data parallelism, by name.

    Raises:
        ConfigError: a size is not a positive integer.
    """
    names = ("tensor", "pipeline", "data")
    return {name: _size(engine_args, f"{name}_parallel_size") for name in names}


def machines(engine_args: Mapping[str, Any]) -> int:
    """Return over how many machines vLLM's own multi-node executor spreads the engine.

    Raises:
        ConfigError: the number is not a positive integer.
    """
    return _size(engine_args, "nnodes")


def master_port(engine_args: Mapping[str, Any]) -> int:
    """Return the port of the first machine, where the workers of all machines meet."""
    return int(engine_args.get("master_port") or _MASTER_PORT)


def _size(engine_args: Mapping[str, Any], argument: str) -> int:
    """Return an engine argument that is a number from 1 on; 1 if it is not given.

    Raises:
        ConfigError: it is something else.
    """
    value = engine_args.get(argument)
    try:
        # null in the file means vLLM's default, which is 1
        size = 1 if value is None else to_int(value)
    except ValueError as error:
        raise ConfigError(f"engine argument {argument} {error}") from None
    if size < 1:
        raise ConfigError(f"engine argument {argument} must be at least 1, not {size}")
    return size


def uses_ray(engine_args: Mapping[str, Any]) -> bool:
    """Return whether Ray starts the engine's workers."""
    backends = ("distributed_executor_backend", "data_parallel_backend")
    return "ray" in map(engine_args.get, backends)


def is_on_one_machine(engine_args: Mapping[str, Any]) -> bool:
    """Return whether all processes of the engine are sure to be on this machine."""
    given = [engine_args.get(name) for name in _FOR_SEVERAL_MACHINES]
    # "is False", because a rank of 0 equals False, and is given.
    none_given = all(value is None or value is False for value in given)
    return none_given and not uses_ray(engine_args) and machines(engine_args) == 1


def _device_name(visible_devices: str, index: int) -> str:
    """Return what CUDA_VISIBLE_DEVICES must be for the one GPU that has this index in Triton.

    Args:
        visible_devices: the server's CUDA_VISIBLE_DEVICES. If it is set, Triton's index counts
            within its list. An entry may be an index or the GPU's UUID.
        index: the index.
    """
    names = [name.strip() for name in visible_devices.split(",") if name.strip()]
    # Without a list, the index is CUDA's own.
    return names[index] if index < len(names) else str(index)
