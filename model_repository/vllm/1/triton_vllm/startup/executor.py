"""Choose vLLM's processes on a machine with few cores."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triton_vllm.startup.devices import parallel_sizes

if TYPE_CHECKING:
    from collections.abc import Mapping

FEW_CORES = 2
"""Up to here EngineCore and a Worker of its own, which spin while they wait for each other, leave no core to the server:
with 32 in flight on two cores, one process for both streamed 1.4 times as fast and never stalled. More was not measured."""
THREADS = "OMP_NUM_THREADS"
BINDING = "VLLM_CPU_OMP_THREADS_BIND"
EXECUTOR = "distributed_executor_backend"
_CHOICES = (EXECUTOR, "kv_transfer_config", "numa_bind")
_CONTEXT_PARALLEL = ("prefill_context_parallel_size", "decode_context_parallel_size")


@dataclass(frozen=True)
class Processes:
    """What to start vLLM with where the operator has not chosen.

    Attributes:
        arguments: engine arguments to add.
        variables: environment variables to set.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)


def choose(engine_args: Mapping[str, Any], environment: Mapping[str, str], cores: int, in_engine_core: Any) -> Processes:
    """Return one process for EngineCore and its worker where vLLM runs on few CPU cores.

    vLLM starts one more process for a CPU engine's one worker, and imports itself again in each, so that it can bind the
    worker's threads to cores. With few cores that gains nothing. EngineCore stays a fresh interpreter, as
    vLLM has it on a CPU: forked, it started 5 s sooner and hung at its first request in 2 of 60 tries, in an OpenMP kernel.

    Args:
        engine_args: an executor, a parallel size, or what takes cores in them is the operator's choice, which stays.
        environment: the process's variables; so is a binding or a reservation of cores. The number of threads
            is respected.
        cores: how many the process may use.
        in_engine_core: vLLM's executor that runs the worker in EngineCore, None where vLLM does not run on a CPU.
    """
    alone = all(size == 1 for size in parallel_sizes(engine_args).values())
    alone = alone and all(str(engine_args.get(name) or 1) == "1" for name in _CONTEXT_PARALLEL)
    binds = environment.get(BINDING, "") not in ("", "nobind") or bool(environment.get("VLLM_CPU_NUM_OF_RESERVED_CPU"))
    chosen = binds or any(engine_args.get(name) for name in _CHOICES)
    if in_engine_core is None or cores > FEW_CORES or chosen or not alone:
        return Processes()
    # one core is left to tokenising and the server, as vLLM's own binding does
    threads = environment.get(THREADS, "") or "1"
    # some vLLM bind in the worker itself unless told not to
    return Processes({EXECUTOR: in_engine_core}, {THREADS: threads, BINDING: "nobind"})


def available_cores() -> int:
    """Return how many cores this process may use: its affinity, and its container's quota where there is one."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
        return min(cores, max(1, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no cgroup of version 2, or "max"
        return cores
