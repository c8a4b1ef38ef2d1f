"""A model loads only with the archive and the stub that were built with it."""

from __future__ import annotations

import json

import pytest

from triton_vllm.base.errors import ConfigError
from triton_vllm.startup.manifest import check


@pytest.fixture
def model(tmp_path):
    """A model directory with a manifest and both files, as the packager leaves it."""
    (tmp_path / "vllm_env.tar.gz").write_bytes(b"x" * 10)
    (tmp_path / "triton_python_backend_stub").write_bytes(b"y" * 5)
    manifest = {
        "archive": {"name": "vllm_env.tar.gz", "size": 10},
        "stub": {"name": "triton_python_backend_stub", "size": 5},
        "vllm": {"version": "0.32.0", "commit": "abc"},
        "python": "3.12",
        "triton_release": "24.10",
        "built_at": "2026-01-01",
    }
    (tmp_path / "vllm_env.json").write_text(json.dumps(manifest))
    return tmp_path


def test_a_whole_model_is_described(model):
    """The log line has the vLLM version, its commit and the Triton release."""
    line = check(model)
    assert all(part in line for part in ("0.32.0", "abc", "24.10", "3.12"))


@pytest.mark.parametrize("name", ["vllm_env.tar.gz", "triton_python_backend_stub"])
def test_a_file_of_another_build_is_refused(model, name):
    """A half-copied repository fails at load with the file's name, not later with a crash."""
    (model / name).write_bytes(b"z")
    with pytest.raises(ConfigError, match=f"{name} has 1 bytes"):
        check(model)


def test_an_unpacked_environment_and_no_manifest_pass(model):
    """A directory layout has no archive, and a model made by hand no manifest."""
    (model / "vllm_env.tar.gz").unlink()
    check(model)
    (model / "vllm_env.json").unlink()
    assert "nothing to check" in check(model)


def test_a_broken_manifest_is_refused(model):
    """It says which file."""
    (model / "vllm_env.json").write_text("{")
    with pytest.raises(ConfigError, match=r"vllm_env\.json cannot be read"):
        check(model)
    (model / "vllm_env.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"vllm_env\.json holds no JSON object"):
        check(model)
