"""What vLLM's processes are given: on a CPU, where a compiler may be missing, and on a GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from triton_vllm.vllm_api import platform
from triton_vllm.vllm_api.platform import THREADS_VARIABLE


@pytest.mark.parametrize("on_cpu", [True, False])
def test_only_a_cpu_goes_on_without_a_compiler(monkeypatch, on_cpu):
    """On a GPU an error of the compiler is not to be hidden."""
    monkeypatch.setattr(platform, "runs_on_cpu", lambda: on_cpu)
    assert ("TORCHDYNAMO_SUPPRESS_ERRORS" in platform.child_environment()) == on_cpu
    assert ("TORCHINDUCTOR_VEC_ISA_OK" in platform.child_environment()) == on_cpu


@pytest.mark.parametrize(
    ("old", "on_cpu", "given", "threads"),
    [(True, False, {}, 1), (True, False, {THREADS_VARIABLE: "4"}, None), (True, True, {}, None), (False, False, {}, None)],
    ids=["old", "chosen", "CPU", "new"],
)
def test_an_old_vllm_computes_with_one_thread_on_a_gpu(monkeypatch, old, on_cpu, given, threads):
    """A newer one does so itself; and the operator's number is kept."""
    set_to: list[int] = []
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(set_num_threads=set_to.append))
    monkeypatch.setattr(platform, "runs_on_cpu", lambda: on_cpu)
    environment = dict(given)
    platform.limit_threads(SimpleNamespace(limits_threads=not old), environment)
    assert set_to == ([threads] if threads else [])
    assert environment == ({THREADS_VARIABLE: str(threads)} if threads else given)


def nvml(*shares: int) -> SimpleNamespace:
    """Return the part of NVML that is asked, with the share of time in which each GPU computed; a negative one is not known."""

    def used(gpu: int) -> SimpleNamespace:
        if shares[gpu] < 0:
            raise RuntimeError("Not Supported")
        return SimpleNamespace(gpu=shares[gpu])

    return SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(shares),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUtilizationRates=used,
    )


@pytest.mark.parametrize(
    ("shares", "computes"), [((0, 0), False), ((0, 3), True), ((0, -1), True), ((), False)], ids=["no", "one", "MIG", "none"]
)
def test_a_gpu_computes_or_may_compute(monkeypatch, shares, computes):
    """One that does not say so may compute."""
    monkeypatch.setattr(platform, "runs_on_cpu", lambda: False)
    monkeypatch.setattr("importlib.import_module", lambda _: nvml(*shares))
    assert platform.devices_compute() == computes


def test_without_nvml_a_gpu_may_compute(monkeypatch):
    """As with GPUs of another maker."""
    monkeypatch.setattr(platform, "runs_on_cpu", lambda: False)
    monkeypatch.setitem(sys.modules, "vllm.third_party.pynvml", None)
    assert platform.devices_compute()
    monkeypatch.setattr(platform, "runs_on_cpu", lambda: True)
    assert not platform.devices_compute()
