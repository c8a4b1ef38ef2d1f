"""Where vLLM's worker runs: the operator's word first."""

from __future__ import annotations

import pytest

from triton_vllm.errors import ConfigError
from triton_vllm.executor import FEW_CORES, Processes, choose

EXECUTOR = object()


def test_few_cores_put_the_worker_into_engine_core():
    """One core is left to the server; one core in all is still one thread; the operator's number stays."""
    assert choose({}, {}, 2, EXECUTOR) == Processes({"distributed_executor_backend": EXECUTOR}, 1)
    assert choose({}, {}, 1, EXECUTOR).variables == {"OMP_NUM_THREADS": "1"}
    assert choose({}, {}, 4, EXECUTOR).threads == 3
    assert choose({}, {"OMP_NUM_THREADS": "2"}, 2, EXECUTOR).threads == 2


@pytest.mark.parametrize(
    ("engine_args", "environment", "cores", "executor"),
    [
        ({"distributed_executor_backend": "mp"}, {}, 2, EXECUTOR),
        ({"tensor_parallel_size": "2"}, {}, 2, EXECUTOR),
        ({"data_parallel_size": 2}, {}, 2, EXECUTOR),
        ({}, {"VLLM_CPU_OMP_THREADS_BIND": "0-1"}, 2, EXECUTOR),
        ({}, {"VLLM_CPU_OMP_THREADS_BIND": "auto"}, 2, EXECUTOR),
        ({}, {}, FEW_CORES + 1, EXECUTOR),
        ({}, {}, 2, None),
    ],
)
def test_the_operators_choice_many_cores_and_gpus_leave_it_to_vllm(engine_args, environment, cores, executor):
    """Nothing is added."""
    assert choose(engine_args, environment, cores, executor) == Processes()
    assert not Processes().variables


def test_no_binding_is_no_choice_of_processes():
    """What leaves the threads to the scheduler fits one process as well."""
    assert choose({}, {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, 2, EXECUTOR).arguments


def test_a_wrong_size_is_named():
    """The same words as for GPUs."""
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        choose({"tensor_parallel_size": "many"}, {}, 2, EXECUTOR)
