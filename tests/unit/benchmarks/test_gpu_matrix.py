"""benchmarks/gpu_matrix.py: its table of rows, when a row is skipped, what it compares, and its page."""

from __future__ import annotations

import base64
import collections
import io
import json
import re
import sys
import threading
import wave
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from support.patience import pause

if TYPE_CHECKING:
    from pathlib import Path

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


def test_the_rows_are_sound() -> None:
    """Each has a name of its own, a known shape and a known check; the ways that people use are all there."""
    from harness.matrix_rows import CHECKS, ROWS
    from harness.matrix_shapes import MATRIX_SHAPES

    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
    assert {"picture", "speech", "warm", "sleep", "lora", "draft-model", "dp-2-ep"} <= set(names)
    for row in ROWS:
        assert row.check in CHECKS
        assert {row.shape, row.draft or row.shape} <= MATRIX_SHAPES.keys()


@pytest.mark.parametrize("at_once", [1, 3])
def test_so_many_rows_run_side_by_side(at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On each GPU, and on two; a row on two GPUs never runs next to one on one."""
    import gpu_matrix
    from harness.matrix_rows import ROWS

    lock, now, most = threading.Lock(), collections.Counter[str](), collections.Counter[str]()

    def row_runs(row: Any, _options: object, devices: str, _work: object) -> dict[str, Any]:
        with lock:
            now[devices] += 1
            assert not (now["0,1"] and now["0"] + now["1"])
            most[devices] = max(most[devices], now[devices])
        pause(0.02)
        with lock:
            now[devices] -= 1
        return {"ok": True}

    monkeypatch.setattr(gpu_matrix, "run_in_process", row_runs)
    options = SimpleNamespace(gpus=2, at_once=at_once, model_repository=tmp_path, device="gpu")
    results = gpu_matrix.Results(tmp_path / "results.json")
    gpu_matrix.run_all(list(ROWS), options, results, tmp_path)
    assert results.by_name.keys() == {row.name for row in ROWS}
    assert set(most.values()) == {at_once}


def test_pictures_and_recordings_differ_and_can_be_read() -> None:
    """The model takes the size from a picture's head, before anything decodes it."""
    from harness import matrix_media
    from triton_vllm.media import pictures

    asked = matrix_media.questions("image")
    assert [pictures.size(one["image"]) for one in asked] == [(112, 112)] * 3
    assert len({one["image"] for one in asked}) == 3
    sounds = {one["audio"] for one in matrix_media.questions("audio")}
    assert len(sounds) == 3
    for sound in sounds:
        with wave.open(io.BytesIO(base64.b64decode(sound))) as file:
            assert (file.getframerate(), file.getnframes()) == (16000, pytest.approx(160000, rel=0.01))


def test_special_tokens_have_the_ids_of_the_configuration(tmp_path: Path) -> None:
    """They are the last ones of the vocabulary, and stand in the texts of the requests."""
    from harness import matrix_media
    from harness.matrix_shapes import MATRIX_SHAPES
    from harness.shapes import write_checkpoint

    for name, kind, expected in (
        ("qwen2-vl", "image", {"<|image_pad|>": "image_token_id", "<|vision_start|>": "vision_start_token_id"}),
        ("whisper", "audio", {"<|startoftranscript|>": "decoder_start_token_id", "<|endoftext|>": "eos_token_id"}),
    ):
        shape = MATRIX_SHAPES[name]
        folder = write_checkpoint(shape, tmp_path / name)
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        added = {entry["content"]: entry["id"] for entry in tokenizer["added_tokens"]}
        assert added.items() <= tokenizer["model"]["vocab"].items()
        assert sorted(tokenizer["model"]["vocab"].values()) == list(range(shape.vocabulary))
        assert {token: added[token] for token in expected} == {token: shape.config[key] for token, key in expected.items()}
        assert set(re.findall(r"<\|\w+\|>", matrix_media.questions(kind)[0]["text"])) <= added.keys()
        assert (folder / "preprocessor_config.json").exists()


def test_a_question_with_pictures_reaches_the_engine(tmp_path: Path) -> None:
    """It is longer than an argument of a program may be (128 KiB)."""
    from harness import matrix_media, matrix_serve
    from harness.matrix_rows import ROWS
    from harness.servers import Setting

    (row,) = (row for row in ROWS if row.name == "picture")
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    answer = "json.dumps([[[float(len(one['image']))] for one in json.load(sys.stdin)['prompts']]] * 2)"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "import json, sys; print({answer})"\n')
    python.chmod(0o755)
    setting = Setting(tmp_path / "env", tmp_path, tmp_path, {}, {}, tmp_path)
    ours = [[float(len(one["image"]))] for one in matrix_media.questions("image")]
    assert sum(each for (each,) in ours) > 128 * 1024
    result: dict[str, Any] = {}
    matrix_serve._compare(row, setting, ours, result)
    assert result["difference"] == 0
