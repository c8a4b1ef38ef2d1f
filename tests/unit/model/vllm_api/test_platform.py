"""What vLLM's processes are given on a CPU, where a compiler may be missing."""

from __future__ import annotations

import pytest

from triton_vllm.vllm_api import platform


@pytest.mark.parametrize("on_cpu", [True, False])
def test_only_a_cpu_goes_on_without_a_compiler(monkeypatch, on_cpu):
    """On a GPU an error of the compiler is not to be hidden."""
    monkeypatch.setattr(platform, "runs_on_cpu", lambda: on_cpu)
    assert ("TORCHDYNAMO_SUPPRESS_ERRORS" in platform.child_environment()) == on_cpu
