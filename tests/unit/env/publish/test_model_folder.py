"""A model's folder: the set in it, and the candidate, which has what the smoke run reads and no gigabytes beside."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.repositories import CHECKOUT
from vllm_env.layout.layouts import LAYOUTS
from vllm_env.publish.model_folder import (
    BuiltSet,
    copy_code,
    set_environment_path,
    stage_additions,
    stage_candidate,
    stage_model,
    write_set,
)

if TYPE_CHECKING:
    from pathlib import Path

_TEMPLATE = CHECKOUT / "model_repository" / "vllm"
_SET = ["triton_python_backend_stub", "vllm_env.cdx.json", "vllm_env.json", "vllm_env.tar.gz"]


@pytest.fixture
def built(tmp_path: Path) -> BuiltSet:
    """A set with an archive."""
    for name in ("stub", "environment"):
        (tmp_path / name).write_text(name)
    return BuiltSet(tmp_path / "stub", tmp_path / "environment", LAYOUTS["archive"], "{}", "{}")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A user's model with code of their own, weights, an adapter, caches and what an earlier build left."""
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
    """The user's configuration for the new layout, their code and the new set; nothing changes in their folder."""
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
        (tmp_path / "current" / "1" / "unpacked.py").touch()
    stage_candidate(built, tmp_path / "current", _TEMPLATE, tmp_path / "new")
    files = _files(tmp_path / "new")
    assert {"config.pbtxt", "1/model.py", "1/triton_vllm/engine/engine.py", *_SET} <= {*files}
    assert ("1/unpacked.py" in files) is half_made
    assert (tmp_path / "new/1/model.py").read_bytes() == (_TEMPLATE / "1/model.py").read_bytes()


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


def _unpacked(folder: Path) -> BuiltSet:
    """A set with an unpacked environment, in which a link leads to the interpreter."""
    (folder / "cache" / "bin").mkdir(parents=True)
    (folder / "cache" / "bin" / "python3.11").write_text("python")
    (folder / "cache" / "bin" / "python").symlink_to("python3.11")
    (folder / "stub").write_text("stub")
    return BuiltSet(folder / "stub", folder / "cache", LAYOUTS["directory"], "{}", "{}")


def test_a_candidate_shares_the_caches_files_and_a_published_model_does_not(tmp_path: Path) -> None:
    """The smoke run reads gigabytes that need not be copied first; a user may edit what is published."""
    built = _unpacked(tmp_path)
    stage_candidate(built, tmp_path / "none", _TEMPLATE, tmp_path / "candidate")
    write_set(built, tmp_path / "staged")
    stage_model(built, tmp_path / "none", _TEMPLATE, tmp_path / "staged")
    cached = tmp_path / "cache" / "bin" / "python3.11"
    assert (tmp_path / "candidate" / "vllm_env" / "bin" / "python3.11").samefile(cached)
    assert not (tmp_path / "staged" / "vllm_env" / "bin" / "python3.11").samefile(cached)


@pytest.mark.parametrize(
    ("name", "value", "becomes"),
    [
        ("vllm_env", "$$TRITON_MODEL_DIRECTORY/vllm_env.tar.gz", "$$TRITON_MODEL_DIRECTORY/vllm_env"),
        ("vllm_env.tar.gz", "$$TRITON_MODEL_DIRECTORY/vllm_env", "$$TRITON_MODEL_DIRECTORY/vllm_env.tar.gz"),
        ("vllm_env", "$$TRITON_MODEL_DIRECTORY/vllm_env", "$$TRITON_MODEL_DIRECTORY/vllm_env"),
        ("vllm_env.tar.gz", "$$TRITON_MODEL_DIRECTORY/vllm_env_2", "$$TRITON_MODEL_DIRECTORY/vllm_env_2"),
        ("vllm_env", "/elsewhere/vllm_env.tar.gz", "/elsewhere/vllm_env.tar.gz"),
    ],
)
def test_only_the_projects_own_environment_path_is_changed(tmp_path: Path, name: str, value: str, becomes: str) -> None:
    """Mode and all other text stay, and a file of the user's that it is a hard link of is not written."""
    (tmp_path / "shared").write_text(f'string_value: "{value}"  # mine\n')
    (tmp_path / "shared").chmod(0o640)
    (tmp_path / "config.pbtxt").hardlink_to(tmp_path / "shared")
    set_environment_path(tmp_path, name)
    config = tmp_path / "config.pbtxt"
    assert config.read_text() == f'string_value: "{becomes}"  # mine\n'
    assert config.stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "shared").read_text() == f'string_value: "{value}"  # mine\n'
    assert config.samefile(tmp_path / "shared") is (value == becomes)


def test_engine_arguments_behind_a_link_are_not_missing(built: BuiltSet, model: Path, tmp_path: Path) -> None:
    """In a staged folder a relative link leads nowhere; the model refuses two files that differ."""
    (model / "1" / "model.json").symlink_to("../../arguments.json")
    missing = stage_additions(built, _TEMPLATE, model, tmp_path / "missing")
    assert "vllm_engine_args.json" not in _files(missing)


def test_the_stubs_libraries_are_next_to_it(tmp_path: Path) -> None:
    """Every user may read them, and they replace those of another Python."""
    libraries = tmp_path / "made" / "stub_lib"
    libraries.mkdir(parents=True)
    (libraries / "libpython3.11.so.1.0").write_text("python")
    (libraries / "libpython3.11.so.1.0").chmod(0o600)
    for name in ("stub", "environment"):
        (tmp_path / name).write_text(name)
    built = BuiltSet(tmp_path / "stub", tmp_path / "environment", LAYOUTS["archive"], "{}", "{}", stub_libraries=libraries)
    write_set(built, tmp_path / "model")
    library = tmp_path / "model" / "stub_lib" / "libpython3.11.so.1.0"
    assert library.stat().st_mode & 0o777 == 0o644
    old = tmp_path / "old"
    (old / "stub_lib").mkdir(parents=True)
    (old / "stub_lib" / "libpython3.10.so.1.0").touch()
    stage_model(built, old, _TEMPLATE, tmp_path / "model")
    assert [path.name for path in (tmp_path / "model" / "stub_lib").iterdir()] == [library.name]


def test_completing_writes_through_no_hard_link(tmp_path: Path, built: BuiltSet, model: Path) -> None:
    """A model without a configuration is completed in the staged folder alone."""
    (model / "config.pbtxt").unlink()
    stage_model(built, model, _TEMPLATE, tmp_path / "new")
    assert (model / "1" / "model.py").read_text() == "mine"
    assert (tmp_path / "new" / "1" / "model.py").read_text() != "mine"
