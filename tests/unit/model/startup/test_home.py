"""Caches where the home cannot be written: every variable that names one points into a folder of this user's own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.fake_log import FakeLog
from triton_vllm.startup.home import keep_compiled, settle

if TYPE_CHECKING:
    from collections.abc import Iterator

HASH = "0123456789abcdef"


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


@pytest.fixture
def home(tmp_path, monkeypatch) -> Iterator[Path]:
    """A home in which nobody can make `.cache`, not even root, for whom modes do not count."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / ".cache").symlink_to("/proc/self/mountinfo")
    monkeypatch.setenv("HOME", str(folder))
    return folder


def test_a_home_that_can_be_written_stays(tmp_path, monkeypatch):
    """Nothing is set, also when the home has no cache yet."""
    monkeypatch.setenv("HOME", str(tmp_path))
    environment: dict[str, str] = {}
    settle(environment, said := FakeLog())
    assert (environment, said.infos) == ({}, [])


def test_caches_move_to_a_folder_of_this_user_alone(home, temporary):
    """The hook's folder for inductor keeps its name there, by which a warm cache recognises it; the log says where."""
    environment = {"TORCHINDUCTOR_CACHE_DIR": f"{home}/.cache/vllm_env/inductor/{HASH}"}
    settle(environment, said := FakeLog())
    place = temporary / f"vllm_env_warm_{os.getuid()}"
    assert environment == {
        "XDG_CACHE_HOME": str(place),
        "TORCHINDUCTOR_CACHE_DIR": f"{place}/vllm_env/inductor/{HASH}",
        "TRITON_HOME": str(place),
        "FLASHINFER_WORKSPACE_BASE": str(place),
    }
    assert place.stat().st_mode & 0o777 == 0o700
    assert str(place) in said.infos[0]


def test_the_operators_folders_stay(home, temporary):
    """One for all caches, or single ones."""
    settle(environment := {"XDG_CACHE_HOME": "/mine"}, FakeLog())
    assert environment == {"XDG_CACHE_HOME": "/mine"}
    settle(environment := {"TORCHINDUCTOR_CACHE_DIR": "/mine", "TRITON_HOME": "/too"}, FakeLog())
    assert (environment["TORCHINDUCTOR_CACHE_DIR"], environment["TRITON_HOME"]) == ("/mine", "/too")


def test_models_of_a_home_that_can_only_be_read_are_found(home, temporary, monkeypatch):
    """A hub's cache that is mounted read-only stays where the libraries look for it."""
    (home / ".cache").unlink()
    (home / ".cache" / "huggingface").mkdir(parents=True)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write wherever a file system can be written
    environment: dict[str, str] = {}
    settle(environment, FakeLog())
    assert environment["HF_HOME"] == str(home / ".cache" / "huggingface")


def test_a_folder_that_others_can_write_is_not_used(home, temporary):
    """vLLM unpickles what lies there; the log says what to name."""
    place = temporary / f"vllm_env_warm_{os.getuid()}"
    place.mkdir()
    place.chmod(0o777)
    environment: dict[str, str] = {}
    settle(environment, said := FakeLog())
    assert environment == {}
    assert "XDG_CACHE_HOME" in said.warnings[0]


def kept(**environment: str) -> tuple[str | None, str | None]:
    """Return Triton's and the C compiler's folder."""
    keep_compiled(environment)
    return environment.get("TRITON_CACHE_DIR"), environment.get("ZIG_GLOBAL_CACHE_DIR")


def test_what_compilers_leave_is_next_to_what_vllm_compiles(tmp_path, monkeypatch):
    """The same folders in every start, wherever the operator has put vLLM's caches."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for root, environment in (
        (f"{tmp_path}/.cache/vllm", {}),
        (f"{tmp_path}/xdg/vllm", {"XDG_CACHE_HOME": f"{tmp_path}/xdg"}),
        (f"{tmp_path}/volume", {"VLLM_CACHE_ROOT": f"{tmp_path}/volume", "XDG_CACHE_HOME": "/mine"}),
        (f"{tmp_path}/v", {"VLLM_CACHE_ROOT": "~/v"}),
    ):
        assert kept(**environment) == (f"{root}/triton", f"{root}/zig")


def test_compilers_keep_the_operators_folders(tmp_path, monkeypatch):
    """Each for itself."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert kept(TRITON_CACHE_DIR="/mine") == ("/mine", f"{tmp_path}/.cache/vllm/zig")
    assert kept(ZIG_GLOBAL_CACHE_DIR="/mine") == (f"{tmp_path}/.cache/vllm/triton", "/mine")
    assert kept(TRITON_HOME="/mine") == (None, f"{tmp_path}/.cache/vllm/zig")


def test_triton_compiles_there_too_if_no_home_can_be_written(home, temporary):
    """The home in the temporary folder is ours, and not the operator's."""
    environment: dict[str, str] = {}
    settle(environment, FakeLog())
    assert environment["TRITON_HOME"]
    assert kept(**environment)[0] == f"{environment['XDG_CACHE_HOME']}/vllm/triton"


def test_compilers_use_no_folder_that_cannot_be_written(home):
    """A C compiler without a cache compiles nothing; it then has its own place below the temporary folder."""
    assert kept() == kept(VLLM_CACHE_ROOT=f"{home}/.cache/volume") == (None, None)
