"""benchmarks/gpu_matrix.py: its table of rows, when a row is skipped, what it compares, and its page."""

from __future__ import annotations

import json
import os
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}


@pytest.fixture
def matrix() -> Any:
    import gpu_matrix

    return gpu_matrix


@pytest.fixture
def model(repository: Path) -> Path:
    """Return a model folder with code and a lock."""
    folder = repository / "vllm"
    (folder / "1" / "triton_vllm").mkdir(parents=True)
    (folder / "1" / "model.py").write_text("first")
    (folder / "vllm_env.json").write_text(json.dumps({"lock_digest": "abc"}))
    return folder


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


def test_a_row_refuses_before_it_starts_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row's own process checks the variables that its servers inherit."""
    from harness import matrix_serve
    from harness.matrix_rows import Row

    monkeypatch.setattr(Row, "environment", lambda _: {})
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(matrix_serve, "TritonTarget", lambda *_: pytest.fail("started"))
    with pytest.raises(RuntimeError, match="NCCL_NVLS_ENABLE"):
        matrix_serve.run_row(Row("two", "llama", gpus=2), SimpleNamespace(), tmp_path)


def test_the_digest_changes_with_code_lock_row_and_device(model: Path) -> None:
    """Bytecode and logs do not change it."""
    from harness.matrix_rows import Row, digest

    row = Row("one", "llama")
    found = [digest(row, model, "gpu"), digest(row, model, "cpu"), digest(Row("one", "qwen3"), model, "gpu")]
    (model / "1" / "triton_vllm" / "cache.pyc").write_text("x")
    assert digest(row, model, "gpu") == found[0]
    (model / "1" / "model.py").write_text("second")
    found.append(digest(row, model, "gpu"))
    (model / "vllm_env.json").write_text(json.dumps({"lock_digest": "abd"}))
    found.append(digest(row, model, "gpu"))
    assert len(set(found)) == len(found)


def test_rows_are_chosen_by_name_and_gpus() -> None:
    """An unknown name, and a row that needs more GPUs, are refused."""
    from harness.matrix_rows import select

    assert [row.name for row in select(["tp-2", "llama"], 2)] == ["tp-2", "llama"]
    assert {row.gpus for row in select([], 1)} == {1}
    with pytest.raises(ValueError, match="no row is called nonsense"):
        select(["llama", "nonsense"], 2)
    with pytest.raises(ValueError, match="tp-2 needs more than 1 GPU"):
        select(["tp-2"], 1)


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


def test_the_reason_of_a_failed_load_is_found() -> None:
    """In Triton's table, wrapped over lines, or else the last error."""
    from harness.matrix_serve import last_reason

    table = (
        "+-------+---------+------+\n| Model | Version | Status |\n"
        "| vllm  | 1       | UNAVAILABLE: Internal: cannot compile;  |\n|       |         | set the backend |\n+---+\n"
    )
    assert last_reason(f"ValueError: other\n{table}") == "UNAVAILABLE: Internal: cannot compile; set the backend"
    assert last_reason("INFO x\nE1 ValueError: first\nRuntimeError: no nvcc\nINFO end\n") == "RuntimeError: no nvcc"
    assert last_reason("INFO only\n") == ""


def run(matrix: Any, model: Path, tmp_path: Path, *more: str) -> int:
    (tmp_path / "env" / "bin").mkdir(parents=True, exist_ok=True)
    (tmp_path / "env" / "bin" / "python").touch()
    own = ["--environment", str(tmp_path / "env"), "--model-repository", str(model.parent), "--device", "cpu"]
    own += ["--out", str(tmp_path / "out.json"), "--work", str(tmp_path / "work")]
    return int(matrix.main([*own, *more]))


def test_a_row_with_a_result_is_skipped(
    matrix: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each result is in the file before the next row starts. New code, and --again, run it again."""
    seen: list[list[str]] = []

    def answer(row: Any, *_: object) -> dict[str, Any]:
        written = json.loads((tmp_path / "out.json").read_text()) if seen else {}
        seen.append([row.name, *written])
        return {"ok": row.name == "llama", "message": "" if row.name == "llama" else "no such layer"}

    monkeypatch.setattr(matrix, "run_in_process", answer)
    monkeypatch.setattr(matrix, "exit_on_sigterm", lambda: None)
    assert run(matrix, model, tmp_path, "--rows", "llama", "qwen3") == 1
    assert seen == [["llama"], ["qwen3", "llama"]]
    assert run(matrix, model, tmp_path, "--rows", "llama") == 0
    assert run(matrix, model, tmp_path, "--rows", "qwen3") == 1
    said = capsys.readouterr().out
    assert "llama: skipped, works" in said
    assert "qwen3: skipped, FAILS; no such layer" in said
    assert len(seen) == 2
    run(matrix, model, tmp_path, "--rows", "llama", "--again")
    (model / "1" / "model.py").write_text("new")
    run(matrix, model, tmp_path, "--rows", "llama")
    assert [one[0] for one in seen[2:]] == ["llama", "llama"]


def test_a_row_ends_at_its_limit(matrix: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result says so; a row whose process dies shows what it said last."""
    from harness.matrix_rows import ROWS

    options = SimpleNamespace(
        environment=tmp_path,
        triton_root=tmp_path,
        model_repository=model.parent,
        device="cpu",
        gpus=1,
        no_compare=True,
        limit=0.3,
    )
    script = tmp_path / "program.py"
    script.write_text("import time; time.sleep(100)")
    monkeypatch.setattr(matrix, "__file__", str(script))
    assert matrix.run_in_process(ROWS[0], options, "0", tmp_path / "a")["message"] == "took over 0 s."
    script.write_text("raise SystemExit('error: no room')")
    options.limit = 60
    found = matrix.run_in_process(ROWS[0], options, "0", tmp_path / "b")
    assert (found["ok"], found["message"]) == (False, "error: no room")
    # Stopped from outside, as at the end of a device's time: the next run tries it again.
    script.write_text("raise SystemExit(143)")
    assert matrix.run_in_process(ROWS[0], options, "0", tmp_path / "c") is None


def test_the_page_has_a_line_for_each_result(matrix: Any) -> None:
    """A failure shows its message, and what vLLM's own server does with the row."""
    results = {
        "llama": {
            "ok": True,
            "seconds_to_ready": 60.1,
            "seconds_to_stop": 4,
            "difference": 0.001,
            "from_itself": 0.002,
            "tells": True,
        },
        "gptq": {"ok": False, "message": "no | kernel\nfor it", "own_server": "RuntimeError: no kernel"},
        "flashinfer-attention": {"ok": True, "message": "set attention_backend"},
    }
    lines = matrix.page(["- machine: one"], results).splitlines()
    assert "- machine: one" in lines
    assert "| llama | 1 | works | 60.1 | 4 | 0.001 (0.002) |  |" in lines
    failed = r"| gptq | 1 | **fails** | - | - | - | no \| kernel for it (vLLM's own server: RuntimeError: no kernel) |"
    assert failed in lines
    assert "| flashinfer-attention | 1 | refused, as it must be | - | - | - | set attention_backend |" in lines
    assert sum(line.startswith("| ") for line in lines) == len(results) + 1


def test_wrong_arguments_are_refused(matrix: Any, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the input; --list needs nothing."""
    for wrong, says in ((["--rows", "none"], "no row is called none"), (["--gpus", "3"], "invalid choice")):
        with pytest.raises(SystemExit) as error:
            run(matrix, model, tmp_path, *wrong)
        assert error.value.code == 2
        assert says in capsys.readouterr().err
    with pytest.raises(SystemExit) as error:
        matrix.main(["--list"])
    assert not error.value.code
    assert "tp-2  (2 GPUs, llama, kill)" in capsys.readouterr().out
