"""benchmarks/gpu_matrix.py: its table of rows, when a row is skipped, what it compares, and its page."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    pass

MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}


def test_each_row_has_a_shape_a_check_and_a_name_of_its_own() -> None:
    """What two GPUs share fits: the sizes are multiples of the blocks on each GPU."""
    from harness.matrix_rows import CHECKS, ROWS
    from harness.matrix_shapes import MATRIX_SHAPES

    assert len({row.name for row in ROWS}) == len(ROWS) > 25
    for row in ROWS:
        assert row.check in CHECKS
        assert {row.shape} | ({row.draft} - {""}) <= set(MATRIX_SHAPES)
        assert bool(row.says) == (row.check == "refused")
        sizes = [int(row.arguments.get(f"{kind}_parallel_size", 1)) for kind in ("tensor", "pipeline", "data")]
        assert sizes[0] * sizes[1] * sizes[2] == row.gpus
        if "weight_block_size" in json.dumps(dict(MATRIX_SHAPES[row.shape].config)):
            config: Any = MATRIX_SHAPES[row.shape].config
            widths = [config[name] for name in ("hidden_size", "intermediate_size", "moe_intermediate_size") if name in config]
            assert [width for width in widths if width % (128 * row.gpus)] == []


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


@pytest.mark.parametrize(
    ("whole", "streamed", "says"),
    [
        ([["w1"], ["w2"]], [["w1"], ["w2"]], ""),
        ([["w1"], ["w2"]], [["w1"], ["w3"]], "prompt 1 gets w2 whole, and streamed w3"),
        ([["w1"], ["w1"]], [["w1"], ["w1"]], "different prompts get one answer"),
        ([["w1"], []], [["w1"], []], "prompt 1 is empty"),
    ],
)
def test_answers_are_sound(whole: list[list[str]], streamed: list[list[str]], says: str) -> None:
    """Different prompts get different answers, and a stream is the whole answer."""
    from harness.matrix_ask import WrongAnswerError, require_sound

    if not says:
        require_sound("triton", whole, streamed)
        return
    with pytest.raises(WrongAnswerError, match=re.escape(says)):
        require_sound("triton", whole, streamed)
