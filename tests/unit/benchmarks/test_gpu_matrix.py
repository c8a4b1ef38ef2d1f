"""benchmarks/gpu_matrix.py: its table of rows, when a row is skipped, what it compares, and its page."""

from __future__ import annotations

import pytest

MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}


def test_a_row_on_two_gpus_never_runs_with_multicast() -> None:
    """It sets the variables itself. Where one lacks or has another value, nothing is started."""
    from harness.matrix_rows import ROWS, require_no_multicast

    two = [row for row in ROWS if row.gpus > 1]
    assert two
    for row in two:
        assert row.environment().items() >= MULTICAST_OFF.items()
        require_no_multicast(row, row.environment())
        for name in MULTICAST_OFF:
            for wrong in ({name: "2"}, {}):
                others = {key: value for key, value in row.environment().items() if key != name}
                with pytest.raises(RuntimeError, match=f"does not start without {name}="):
                    require_no_multicast(row, others | wrong)


def test_a_difference_is_judged_by_the_engines_own() -> None:
    """It must also tell one prompt from another, or the comparison says nothing."""
    from harness.matrix_serve import judge

    engine = [[[-7.0, -7.5], [-6.0, -6.5]], [[-7.01, -7.5], [-6.0, -6.5]]]
    assert judge([[-7.005, -7.5], [-6.0, -6.5]], engine)["within"]
    assert not judge([[-7.1, -7.5], [-6.0, -6.5]], engine)["within"]
    assert not judge([[-7.0], [-6.0, -6.5]], engine)["within"]
    assert judge(engine[0], engine)["tells"]
    same = [[[-7.0, -7.5], [-7.0, -7.5]]] * 2
    assert not judge(same[0], same)["tells"]
