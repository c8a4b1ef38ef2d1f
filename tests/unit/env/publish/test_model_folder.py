"""env/vllm_env/candidate.py: the smoke run gets what it reads, and not the gigabytes that it does not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from support.repositories import CHECKOUT
from vllm_env.publish.model_folder import copy_code, stage_candidate
from vllm_env.publish.publish import BuiltSet
from vllm_env.serve.smoke import copy_model

if TYPE_CHECKING:
    from pathlib import Path

_TEMPLATE = CHECKOUT / "model_repository" / "vllm"
_SET = ["triton_python_backend_stub", "vllm_env.cdx.json", "vllm_env.json", "vllm_env.tar.gz"]


@pytest.fixture
def built(tmp_path: Path) -> BuiltSet:
    """A set with an archive."""
    for name in ("stub", "environment"):
        (tmp_path / name).write_text(name)
    return BuiltSet(tmp_path / "stub", tmp_path / "environment", "archive", "{}", "{}")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A person's model with code of their own, weights, an adapter, caches and what an earlier build left."""
    folder = tmp_path / "models" / "vllm"
    for name in ("1/own", "weights", "adapters/one", "vllm_cache", "vllm_env/bin"):
        (folder / name).mkdir(parents=True)
    (folder / "config.pbtxt").write_text('string_value: "$$TRITON_MODEL_DIRECTORY/vllm_env"  # mine\n')
    (folder / "1" / "model.py").write_text("mine")
    (folder / "1" / "own" / "code.py").write_text("mine")
    for name in (
        "weights/0.safetensors",
        "adapters/one/a.bin",
        "vllm_cache/warm.json",
        "vllm_env/bin/python",
        "vllm_env.json",
    ):
        (folder / name).write_text("older")
    return folder


def _files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir())


def test_only_what_is_read_is_taken(built: BuiltSet, model: Path, tmp_path: Path) -> None:
    """The person's configuration for the new layout, their code and the new set; nothing changes in their folder."""
    before = _files(model)
    stage_candidate(built, model, _TEMPLATE, tmp_path / "new" / "vllm")
    assert _files(tmp_path / "new" / "vllm") == ["1/model.py", "1/own/code.py", "config.pbtxt", *_SET]
    text = (tmp_path / "new" / "vllm" / "config.pbtxt").read_text()
    assert text == 'string_value: "$$TRITON_MODEL_DIRECTORY/vllm_env.tar.gz"  # mine\n'
    assert (tmp_path / "new" / "vllm" / "vllm_env.json").read_text() == "{}"
    assert _files(model) == before
    assert "vllm_env.tar.gz" not in (model / "config.pbtxt").read_text()


@pytest.mark.parametrize("half_made", [True, False])
def test_a_model_that_is_not_whole_is_completed(built: BuiltSet, tmp_path: Path, half_made: bool) -> None:
    """As publishing does it, so that what is published has been served."""
    if half_made:
        (tmp_path / "current" / "1").mkdir(parents=True)
        (tmp_path / "current" / "1" / "kept.py").touch()
    stage_candidate(built, tmp_path / "current", _TEMPLATE, tmp_path / "new")
    files = _files(tmp_path / "new")
    assert {"config.pbtxt", "1/model.py", "1/triton_vllm/engine.py", *_SET} <= {*files}
    assert ("1/kept.py" in files) is half_made
    assert (tmp_path / "new/1/model.py").read_bytes() == (_TEMPLATE / "1/model.py").read_bytes()


def test_the_candidate_can_be_served(built: BuiltSet, model: Path, tmp_path: Path) -> None:
    """The smoke run's own copy of it is whole."""
    stage_candidate(built, model, _TEMPLATE, tmp_path / "new")
    copy_model(tmp_path / "new", tmp_path / "copy", {"model": "x"})
    names = ["triton_python_backend_stub", "vllm_engine_args.json", "vllm_env.json", "vllm_env.tar.gz"]
    assert _files(tmp_path / "copy") == ["1/model.py", "1/own/code.py", "config.pbtxt", *names]
    assert json.loads((tmp_path / "copy" / "vllm_engine_args.json").read_text()) == {"model": "x"}


def test_code_is_followed_and_data_is_not(tmp_path: Path) -> None:
    """Links to a model.py and to a package that several models share; weights, a folder of data and what is not there."""
    version, shared, copy = tmp_path / "vllm" / "1", tmp_path / "shared", tmp_path / "copy"
    for folder in (version / "__pycache__", shared / "package", shared / "data"):
        folder.mkdir(parents=True)
    for file in (shared / "model.py", shared / "package/__init__.py", shared / "data/blob", version / "0.safetensors"):
        file.write_text(file.name)
    for name, target in (("model.py", "model.py"), ("package", "package"), ("data", "data"), ("gone", "nowhere")):
        (version / name).symlink_to(f"../../shared/{target}")
    copy_code(version, copy)
    assert _files(copy) == ["model.py", "package/__init__.py"]
    assert not any(path.is_symlink() for path in copy.rglob("*"))
