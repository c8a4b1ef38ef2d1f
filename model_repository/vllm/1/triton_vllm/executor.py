"""Chooses vLLM's processes on a machine with few cores."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from triton_vllm.devices import parallel_sizes

if TYPE_CHECKING:
    from collections.abc import Mapping

FEW_CORES = 4
"""Up to here EngineCore and a Worker of its own, which spin while they wait for each other, leave no core to the server:
on two cores one process for both streamed 1.4 times as fast, never stalled, and was up 6 s sooner."""
_NAME = "distributed_executor_backend"
_BINDING = "VLLM_CPU_OMP_THREADS_BIND"


@dataclass(frozen=True)
class Processes:
    """What to start vLLM with where the operator has not chosen.

    Attributes:
        arguments: engine arguments to add.
        threads: how many threads compute in an EngineCore that is forked from this process, which has imported vLLM
            already; None leaves process and threads to vLLM.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    threads: int | None = None

    @property
    def variables(self) -> dict[str, str]:
        """What an EngineCore in an interpreter of its own, as after a restart, must find in its environment."""
        return {} if self.threads is None else {"OMP_NUM_THREADS": str(self.threads)}


def choose(
    engine_args: Mapping[str, Any], environment: Mapping[str, str], cores: int, in_engine_core: Any
) -> Processes:
    """Return one process for EngineCore and its worker where vLLM runs on few CPU cores.

    vLLM gives a CPU engine a process more for its one worker, and imports itself anew in each, so that it can bind the
    worker's threads to cores. With few cores there is nothing to gain by that.

    Args:
        engine_args: an executor or a parallel size in them is the operator's choice, which stays.
        environment: the process's variables; so is a binding of threads. OMP_NUM_THREADS is respected.
        cores: how many the process may use.
        in_engine_core: vLLM's executor that runs the worker in EngineCore, None where vLLM does not run on a CPU.
    """
    alone = all(size == 1 for size in parallel_sizes(engine_args).values())
    chosen = engine_args.get(_NAME) or environment.get(_BINDING, "nobind") not in ("", "nobind")
    if in_engine_core is None or cores > FEW_CORES or chosen or not alone:
        return Processes()
    given = environment.get("OMP_NUM_THREADS", "")
    # one core is left to tokenising and the server, as vLLM's own binding does
    threads = int(given) if given.isdigit() and int(given) else max(1, cores - 1)
    return Processes({_NAME: in_engine_core}, threads)
