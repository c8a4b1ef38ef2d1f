"""What a run of the tests works on: a copy of the checkout as a clone has it, and caches filled from the user's."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from support import own_place

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout in which somebody has built a model."""
    folder = tmp_path / "mine"
    for name in ("README.md", "tests/test_new.py", "model_repository/vllm/config.pbtxt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / ".gitignore").write_text(
        "/model_repository/*/vllm_env.tar.gz\n/model_repository/*/vllm_engine_args.json\n/.triton/\n"
    )
    for name in ("model_repository/vllm/vllm_env.tar.gz", "model_repository/vllm/vllm_engine_args.json", ".triton/RELEASE"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("built")
    return folder


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's home with a cache."""
    home = tmp_path / "user"
    for name in (
        ".cache/vllm_env/prefixes/k/env/bin/python",
        ".cache/vllm_env/prefixes/k/.complete",
        ".cache/vllm_env/build/left",
        ".config/pip/pip.conf",
    ):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(name)
    monkeypatch.setenv("HOME", str(home))
    for name in ("XDG_CACHE_HOME", "VLLM_ENV_CACHE", "UV_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    return home


def prepare(checkout: Path, data: Path) -> None:
    """Prepare the first copy."""
    own_place.prepare(checkout, data, data / "checkout")


def test_a_hook_of_git_does_not_lead_into_the_users_repository(
    checkout: Path, user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Git gives its hooks GIT_DIR, which goes before ``-C``."""
    subprocess.run(["git", "-C", checkout, "init", "--quiet"], check=True)
    monkeypatch.setenv("GIT_DIR", str(checkout / ".git"))
    for _ in range(2):
        prepare(checkout, tmp_path / "data")
        (checkout / "README.md").write_text("changed")
    monkeypatch.delenv("GIT_DIR")
    told = subprocess.run(["git", "-C", checkout, "log"], check=False, capture_output=True, text=True)
    assert "as tested" not in told.stdout
    assert (tmp_path / "data/checkout/.git").is_dir()


def test_variables_that_lead_to_the_users_files_are_left_out(tmp_path: Path) -> None:
    """Those of the tests themselves, and where certificates are, stay."""
    given = {"HF_HOME": "/h", "VLLM_ENV_CACHE": "/c", "XDG_CACHE_HOME": "/x", "VLLM_ENV_TEST_TRITON_ROOT": "/t", "PATH": "/bin"}
    kept = own_place.own_variables(
        {**given, "GIT_DIR": "/g", "GIT_SSL_CAINFO": "/s", "PYTHONDONTWRITEBYTECODE": "1"}, tmp_path, tmp_path
    )
    assert not {"HF_HOME", "VLLM_ENV_CACHE", "XDG_CACHE_HOME", "GIT_DIR", "PYTHONDONTWRITEBYTECODE"} & kept.keys()
    assert (kept["PATH"], kept["VLLM_ENV_TEST_TRITON_ROOT"], kept["GIT_SSL_CAINFO"]) == ("/bin", "/t", "/s")
    assert kept["HOME"] == str(tmp_path / "home")
