"""GPUs of an instance are chosen as Triton's instance kind says, and misfits are refused."""

from __future__ import annotations

import pytest

from triton_vllm.base.errors import ConfigError
from triton_vllm.startup.devices import is_on_one_machine, master_port, visible


@pytest.mark.parametrize(
    ("kind", "device", "gpus", "args", "already", "expected"),
    [
        ("MODEL", 0, (), {"tensor_parallel_size": 4}, "", None),
        ("MODEL", 0, (2, 3), {"tensor_parallel_size": "2"}, "", "2,3"),
        ("MODEL", 0, (4, 5), {"tensor_parallel_size": 4, "nnodes": "2"}, "", "4,5"),
        ("GPU", 1, (), {}, "", "1"),
        ("GPU", 1, (), {}, "4,5", "5"),
        ("GPU", 0, (), {}, "GPU-abc", "GPU-abc"),
        ("CPU", 0, (), {}, "", None),
    ],
)
def test_devices(kind, device, gpus, args, already, expected):
    """KIND_GPU takes Triton's GPU, counted among the visible ones; KIND_MODEL leaves it to vLLM or GPU_DEVICE_IDS."""
    assert visible(kind, device, gpus, args, {"CUDA_VISIBLE_DEVICES": already} if already else {}) == expected


@pytest.mark.parametrize(
    ("kind", "gpus", "args", "says"),
    [
        (
            "GPU",
            (),
            {"tensor_parallel_size": 2},
            "KIND_GPU is currently for single-GPU models, please specify KIND_MODEL",
        ),
        ("GPU", (), {"data_parallel_size": 2}, "KIND_GPU is currently for single-GPU models"),
        ("GPU", (1,), {}, "GPU_DEVICE_IDS is for KIND_MODEL"),
        ("MODEL", (0,), {"tensor_parallel_size": 2}, "number of GPU IDs specified in GPU_DEVICE_IDS parameter must match"),
        ("MODEL", (0, 1, 2), {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "= 4"),
        ("MODEL", (0, 1, 2, 3), {"tensor_parallel_size": 4, "nnodes": 2}, "= 4), and it has 4 for each of 2 machines."),
        ("MODEL", (), {"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1"),
    ],
)
def test_misfits_are_refused(kind, gpus, args, says):
    """The message names the sizes and the remedy."""
    with pytest.raises(ConfigError) as caught:
        visible(kind, 0, gpus, args, {})
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({}, True),
        ({"data_parallel_size": 2, "nnodes": 1, "data_parallel_rank": None}, True),
        ({"nnodes": 2}, False),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2}, False),
        ({"data_parallel_rank": 0}, False),
        ({"distributed_executor_backend": "ray"}, False),
        ({"data_parallel_backend": "ray"}, False),
    ],
)
def test_an_engine_that_may_be_on_several_machines(args, expected):
    """What works there is not seen here."""
    assert is_on_one_machine(args) == expected


@pytest.mark.parametrize(("args", "port"), [({}, 29501), ({"master_port": None}, 29501), ({"master_port": "29700"}, 29700)])
def test_the_port_where_several_machines_meet(args, port):
    """vLLM's default, or the operator's."""
    assert master_port(args) == port
