"""Choose vLLM's processes where cores are few, and recommend front ends where they are many."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triton_vllm.startup.devices import parallel_sizes
from triton_vllm.vllm_api.platform import THREADS_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

FEW_CORES = 2
"""Up to this number of cores, EngineCore and its worker share one process. As two processes they
spin while they wait for each other, and leave no core to the server. With 32 requests in flight on
two cores, one process streamed 1.4 times as fast and never stalled. More cores were not
measured."""
MANY_CORES = 8
"""From this number of cores on, two threads send responses, and a GPU's engine may outrun one
front end. With fewer cores, a second thread only takes time from the engine."""
BINDING_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"
EXECUTOR_ARGUMENT = "distributed_executor_backend"
_CHOSEN_BY = (EXECUTOR_ARGUMENT, "kv_transfer_config", "numa_bind")
_CONTEXT_PARALLEL_SIZES = ("prefill_context_parallel_size", "decode_context_parallel_size")


@dataclass(frozen=True)
class Processes:
    """How to start vLLM where the operator has not chosen.

    Attributes:
        arguments: engine arguments to add.
        variables: environment variables to set.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)


def choose(
    engine_args: Mapping[str, Any], environment: Mapping[str, str], cores: int, in_engine_core: Any
) -> Processes:
    """Return the settings that put EngineCore and its worker into one process on few CPU cores.

    For a CPU engine, vLLM starts an additional process for its one worker, so that it can bind the
    worker's threads to cores. It imports itself again in each process. With few cores the
    additional process gains nothing.

    EngineCore stays a fresh interpreter, as vLLM starts it on a CPU. Forked, it started 5 s sooner.
    But it hung at its first request in 2 of 60 tries, in an OpenMP kernel.

    Args:
        engine_args: the operator's arguments. If they choose an executor, a parallel size or a use
            of cores, nothing is added.
        environment: the process's variables. If they bind or reserve cores, nothing is added. A
            chosen number of threads is kept.
        cores: how many cores the process may use.
        in_engine_core: vLLM's executor that runs the worker in EngineCore. None if vLLM does not
            run on a CPU.
    """
    if in_engine_core is None or cores > FEW_CORES:
        return Processes()
    # Several workers need several processes. The values are compared as strings because old files
    # of engine arguments have strings for numbers.
    sizes = [*parallel_sizes(engine_args).values()]
    sizes += [engine_args.get(name) or 1 for name in _CONTEXT_PARALLEL_SIZES]
    is_parallel = any(str(size) != "1" for size in sizes)
    # Bound or reserved cores mean that the operator has divided them.
    is_bound = environment.get(BINDING_VARIABLE, "") not in ("", "nobind")
    is_reserved = environment.get("VLLM_CPU_NUM_OF_RESERVED_CPU")
    is_chosen = any(map(engine_args.get, _CHOSEN_BY))
    if is_parallel or is_bound or is_reserved or is_chosen:
        return Processes()
    # One core is left to tokenizing and to the server. vLLM's own binding leaves one, too.
    threads = environment.get(THREADS_VARIABLE) or "1"
    # Some versions of vLLM also bind threads in the worker, unless this variable forbids it.
    return Processes(
        {EXECUTOR_ARGUMENT: in_engine_core}, {THREADS_VARIABLE: threads, BINDING_VARIABLE: "nobind"}
    )


def advice(cores: int, instances: int, *, on_cpu: bool) -> str:
    """Return a line for the log that recommends more front ends; "" if there is none to give.

    Args:
        cores: how many cores the process may use.
        instances: how many instances the model has.
        on_cpu: whether vLLM runs on a CPU.
    """
    if on_cpu or cores < MANY_CORES or instances > 1:
        return ""
    # With 256 streams of a Llama-7B on an H200, the gap between two pieces of a stream was 62 ms
    # with one front end and 36 ms with two (99th percentile).
    return (
        f"there are {cores} cores: for more than 64 streams at once, set count: 2 in "
        "config.pbtxt's instance_group (a second front end for the same engine)"
    )


def available_cores() -> int:
    """Return how many cores this process may use: its affinity, or the container's lower quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        # The file has microseconds of processor time, and the period in which they may be used.
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
        return min(cores, max(1, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no cgroup of version 2, or no quota ("max")
        return cores
