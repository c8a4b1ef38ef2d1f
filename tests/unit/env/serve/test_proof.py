"""A smoke run's answers are remembered until something changes that they depend on."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from support.small_fixtures import workspace_in
from vllm_env.layout.layout import EnvironmentRecord
from vllm_env.model.manifest import Manifest, StubRecord, VllmRecord
from vllm_env.serve import proof as module
from vllm_env.serve.proof import Subject, recall, remember
from vllm_env.serve.smoke import SmokeResult

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from vllm_env.base.cache import Cache

_MODEL = (
    *(
        "vllm_env.json",
        "config.pbtxt",
        "vllm_engine_args.json",
        "multi_lora.json",
        "vllm_env.tar.gz",
        "vllm_env.parts/000.tar.gz",
    ),
    *("triton_python_backend_stub", "stub_lib/libpython3.11.so", "1/model.py", "1/triton_vllm/service.py"),
)
_TRITON = ("bin/tritonserver", "lib/libtritonserver.so", "backends/python/libtriton_python.so")
_MANIFEST = Manifest(
    "k", "parts", VllmRecord("0.33.0", "", "vllm", "release"), "3.12.1", {}, "24.10",
    (EnvironmentRecord("vllm_env.tar.gz"), EnvironmentRecord("vllm_env.parts/000.tar.gz")),
    StubRecord("b", 4, "3.12", "24.10", "prebuilt"),
    spec={"profile": "cuda"}, lock_digest="c", left_out=(), built_at="2026-01-01T00:00:00+00:00",
)  # fmt: skip
_RESULT = SmokeResult(("asked", "PASS"), (("Hello", " there"),), 2.0, {"model": "/m"}, "2026-01-02T00:00:00+00:00")


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    """An empty one."""
    return workspace_in(tmp_path / "cache").cache


@pytest.fixture
def subject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Subject:
    """A model for a GPU, with a client and prompts; each file has its name as content."""
    names = [f"models/opt/{name}" for name in _MODEL] + [f"triton/{name}" for name in _TRITON]
    for name in (*names, "client/client.py", "client/loadtest/run.py", "prompts.txt", "nvidia/version"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    monkeypatch.setattr(module, "CLIENT", tmp_path / "client/client.py")
    monkeypatch.setattr(module, "PROMPTS", tmp_path / "prompts.txt")
    monkeypatch.setattr("vllm_env.base.machine._NVIDIA", tmp_path / "nvidia")
    return Subject(tmp_path / "models/opt", _MANIFEST, tmp_path / "triton")


def test_no_engine_argument_is_kept(cache: Cache, subject: Subject) -> None:
    """One may be a secret, such as a token of a hub."""
    remember(cache, subject, replace(_RESULT, engine_args={"hf_token": "hf_secret"}))
    (file,) = cache.path("proofs").iterdir()
    assert "secret" not in file.read_text()


@pytest.mark.parametrize(
    "name",
    [
        *(f"models/opt/{name}" for name in (*_MODEL, "1/new.py")),
        *(f"triton/{name}" for name in (*_TRITON, "backends/python/new.so")),
        *("client/client.py", "client/loadtest/run.py", "client/loadtest/new.py", "prompts.txt"),
    ],
)
@pytest.mark.parametrize("way", ["size", "mtime"])
def test_a_changed_file_is_a_change(cache: Cache, subject: Subject, tmp_path: Path, name: str, way: str) -> None:
    """Each file that the run used, and a new one next to them."""
    remember(cache, subject, _RESULT)
    file = tmp_path / name
    before = file.stat() if file.exists() else None
    if way == "size":
        file.write_text("of another size")
        if before:
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    else:
        file.touch()
        os.utime(file, (1, 1))
    assert recall(cache, subject) is None


def _another_driver(tmp_path: Path) -> None:
    (tmp_path / "nvidia/version").write_text("580.1")


def _another_gpu(tmp_path: Path) -> None:
    (tmp_path / "nvidia/gpus/0000:01").mkdir(parents=True)
    (tmp_path / "nvidia/gpus/0000:01/information").write_text("Model: \t NVIDIA H200\nIRQ: 7\n")


@pytest.mark.parametrize("change", [_another_driver, _another_gpu])
def test_another_gpu_is_a_change_for_a_model_that_uses_one(
    cache: Cache, subject: Subject, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    """A model for the CPU has nothing to do with it."""
    on_cpu = replace(subject, model=subject.triton, manifest=replace(_MANIFEST, spec={"profile": "cpu"}))
    for folder in ("1", "stub_lib"):
        (on_cpu.model / folder).mkdir()
    for one in (subject, on_cpu):
        remember(cache, one, _RESULT)
    change(tmp_path)
    assert recall(cache, subject) is None
    assert recall(cache, on_cpu)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"state": {}}', '{"state": {}, "result": {}}'])
def test_a_damaged_entry_is_none(cache: Cache, subject: Subject, text: str) -> None:
    """Also one of another version, which has other fields."""
    remember(cache, subject, _RESULT)
    (file,) = cache.path("proofs").iterdir()
    file.write_text(text)
    assert recall(cache, subject) is None
    remember(cache, subject, _RESULT)
    entry = json.loads(file.read_text())
    file.write_text(json.dumps({**entry, "result": {**entry["result"], "unknown": 1}}))
    assert recall(cache, subject) is None
