"""What makes a build of a tree another one: the variables, the precompiled wheel, the interpreter; and why one failed."""

from __future__ import annotations

import os
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from support.small_build import make_tree
from support.small_fixtures import workspace_in
from vllm_env.base.errors import CommandError, UsageError, VllmEnvError
from vllm_env.base.network import Network, NetworkError
from vllm_env.lock import source_build
from vllm_env.lock.pins import resolve_pin
from vllm_env.lock.source_build import build_folder
from vllm_env.lock.spec import Pin, Spec

_LOCATION = "VLLM_PRECOMPILED_WHEEL_LOCATION"


@pytest.fixture(autouse=True)
def _own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of whoever runs the tests are another build's."""
    for name in list(os.environ):
        if source_build._CHANGES_WHEEL.fullmatch(name):
            monkeypatch.delenv(name)


def _key(profile: str = "cuda", python: str = "3.12", identity: str = "tree") -> str:
    spec = Spec(profile, Pin("source", "/tree"), "vllm", python)
    return build_folder(workspace_in(Path("/cache")), spec, identity).name


@pytest.mark.parametrize(
    "name",
    [
        "VLLM_USE_PRECOMPILED",
        "VLLM_A_FORKS_OWN",
        "TORCH_CUDA_ARCH_LIST",
        "CUDA_HOME",
        "CMAKE_ARGS",
        "CXXFLAGS",
        "FLASH_MLA_SRC_DIR",
        "SETUPTOOLS_SCM_PRETEND_VERSION",
    ],
)
def test_a_variable_that_changes_the_wheel_is_in_its_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set, and with another value."""
    keys = {_key()}
    for value in ("1", "2"):
        monkeypatch.setenv(name, value)
        keys.add(_key())
    assert len(keys) == 3


def test_the_precompiled_wheel_counts_by_place_and_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path is the user's; the same path may have another file the next time."""
    monkeypatch.chdir(tmp_path)
    keys = []
    for content in ("a", "b"):
        for name in ("one.whl", "other.whl"):
            with zipfile.ZipFile(tmp_path / name, "w") as archive:
                archive.writestr("vllm/_C.abi3.so", content)
            monkeypatch.setenv(_LOCATION, name)
            keys.append(_key())
    assert len(set(keys)) == 4
    for same in (tmp_path / "other.whl", (tmp_path / "other.whl").as_uri()):
        monkeypatch.setenv(_LOCATION, str(same))
        assert _key() == keys[-1]
    monkeypatch.setenv(_LOCATION, "https://localhost/vllm.whl")
    assert _key() not in keys


def test_a_folder_of_sources_counts_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CMake takes a dependency's sources from there."""
    tree = make_tree(tmp_path / "cutlass")
    monkeypatch.setenv("VLLM_CUTLASS_SRC_DIR", str(tree))
    first = _key()
    (tree / "vllm" / "new.cu").touch()
    assert _key() != first


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize(("content", "state"), [(None, "does not exist"), (b"<html>", "is not a wheel")])
def test_a_wrong_precompiled_wheel_is_refused_first(
    content: bytes | None, state: str, dry_run: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is copied or built, also with a wheel of the tree in the cache; the message names variable and file."""
    file = tmp_path / "vllm.whl"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv(_LOCATION, str(file))
    tree = make_tree(tmp_path / "tree")
    workspace = replace(workspace_in(tmp_path / "cache", Network()), dry_run=dry_run)
    with pytest.raises(UsageError, match=f"{_LOCATION}: {file} {state}"):
        resolve_pin(workspace, Spec("cuda", Pin("source", str(tree)), "vllm", "3.12"))
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("location", ["https://localhost/vllm-1-py3-none-any.whl", ""])
def test_offline_a_build_fetches_no_precompiled_wheel(location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own build would fetch it: it does not know of --offline."""
    monkeypatch.setenv("VLLM_USE_PRECOMPILED", "1")
    monkeypatch.setenv(_LOCATION, location)
    tree = make_tree(tmp_path / "tree")
    with pytest.raises(NetworkError, match=r"--offline: cannot (download https://localhost|ask vLLM's wheel index)"):
        resolve_pin(workspace_in(tmp_path / "cache"), Spec("cuda", Pin("source", str(tree)), "vllm", "3.12"))


@pytest.mark.parametrize(
    ("line", "cause", "remedy"),
    [
        ("RuntimeError: CUDA_HOME is not set", "no working nvcc", "VLLM_USE_PRECOMPILED=1"),
        ("No such file or directory: '/usr/local/cuda/bin/nvcc'", "no working nvcc", "VLLM_PRECOMPILED_WHEEL_COMMIT"),
        ("  No CMAKE_CXX_COMPILER could be found.", "no working C++ compiler", "apt-get install g++"),
        ("LookupError: setuptools-scm was unable to detect version for /x.", "finds no version", "VLLM_VERSION_OVERRIDE"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "memory", "MAX_JOBS=1"),
        ("RuntimeError: Failed to fetch precompiled wheel metadata for CUDA", "wheel index", _LOCATION),
        ("ModuleNotFoundError: No module named 'torchx'", "ModuleNotFoundError: No module named 'torchx'.", "must build"),
    ],
)
def test_a_failed_build_is_explained(line: str, cause: str, remedy: str, tmp_path: Path) -> None:
    """One likely cause and the log's path; the 25 lines around it are in the log."""
    log = tmp_path / "wheel-build.log"
    log.write_text(f"-- Detecting CXX compile features\n{line}\n-- Configuring incomplete, errors occurred!\n")
    error = source_build._explained(CommandError("uv ended with status 2.", tail=line), tmp_path / "tree", log)
    assert type(error) is VllmEnvError
    assert cause in error.cause
    assert remedy in error.remedy
    assert error.remedy.endswith(f"The output: {log}.")
    assert len(error.lines()) == 3


def test_a_cache_in_the_tree_is_refused(tmp_path: Path) -> None:
    """The copy would be a part of what is copied; nothing is made in the user's tree."""
    spec = Spec("cuda", Pin("source", str(tmp_path)), "vllm", "3.12")
    with pytest.raises(UsageError, match="is in this tree") as caught:
        resolve_pin(workspace_in(tmp_path / "cache"), spec)
    assert "VLLM_ENV_CACHE" in caught.value.remedy
    assert list(tmp_path.iterdir()) == []
