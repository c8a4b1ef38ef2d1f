"""Where vLLM's worker runs: the operator's word first."""

from __future__ import annotations

import os

import pytest

from triton_vllm.base.errors import ConfigError
from triton_vllm.startup.executor import FEW_CORES, MANY_CORES, Processes, advice, available_cores, choose

EXECUTOR = object()
ONE_PROCESS = {"distributed_executor_backend": EXECUTOR}


@pytest.mark.parametrize("cores", [1, FEW_CORES])
def test_few_cores_put_the_worker_into_engine_core(cores):
    """One thread computes, bound to nothing, so one core is left to the server."""
    variables = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    assert choose({}, {"VLLM_CPU_OMP_THREADS_BIND": ""}, cores, EXECUTOR) == Processes(ONE_PROCESS, variables)


def test_the_operators_number_of_threads_stays():
    """It says nothing about where the worker runs."""
    chosen = choose({}, {"OMP_NUM_THREADS": "2"}, 2, EXECUTOR)
    assert chosen.arguments == ONE_PROCESS
    assert chosen.variables["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize(
    ("engine_args", "environment", "cores", "executor"),
    [
        ({"distributed_executor_backend": "mp"}, {}, 2, EXECUTOR),
        ({"tensor_parallel_size": "2"}, {}, 2, EXECUTOR),
        ({"data_parallel_size": 2}, {}, 2, EXECUTOR),
        ({"prefill_context_parallel_size": 2}, {}, 2, EXECUTOR),
        ({"kv_transfer_config": {"kv_connector": "x"}}, {}, 2, EXECUTOR),
        ({}, {"VLLM_CPU_OMP_THREADS_BIND": "0-1"}, 2, EXECUTOR),
        ({}, {"VLLM_CPU_OMP_THREADS_BIND": "auto"}, 2, EXECUTOR),
        ({}, {"VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}, 2, EXECUTOR),
        ({}, {}, FEW_CORES + 1, EXECUTOR),
        ({}, {}, 2, None),
    ],
)
def test_the_operators_choice_many_cores_and_gpus_leave_it_to_vllm(engine_args, environment, cores, executor):
    """Nothing is added."""
    assert choose(engine_args, environment, cores, executor) == Processes()


def test_no_more_cores_than_the_process_may_use():
    """The affinity is an upper bound, a container's quota may be lower."""
    assert 1 <= available_cores() <= len(os.sched_getaffinity(0))


def test_a_wrong_size_is_named():
    """The same words as for GPUs."""
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        choose({"tensor_parallel_size": "many"}, {}, 2, EXECUTOR)


@pytest.mark.parametrize(
    ("cores", "instances", "on_cpu", "advised"),
    [(MANY_CORES, 1, False, True), (16, 2, False, False), (16, 1, True, False), (MANY_CORES - 1, 1, False, False)],
)
def test_many_cores_beside_a_gpu_are_worth_a_second_front_end(cores: int, instances: int, on_cpu: bool, advised: bool) -> None:
    """One line, unless there is a second one already, or no core for it."""
    line = advice(cores, instances, on_cpu=on_cpu)
    assert ("count: 2" in line) is advised
    assert "\n" not in line
