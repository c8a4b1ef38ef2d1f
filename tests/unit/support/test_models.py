"""Models that several workers need are made by one of them."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING, Any

import pytest

from support import models
from vllm_env.base.locks import take_lock

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_env.base.workspace import Workspace


def test_a_standin_is_made_by_one_process_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is made, nobody else can take the lock of the folder with the tests' data."""
    made = tmp_path / "standin"

    def make(workspace: Workspace, *_: Any) -> Path:
        with pytest.raises(BlockingIOError):
            take_lock(workspace.cache.root / "build.lock", fcntl.LOCK_EX | fcntl.LOCK_NB, os.O_RDWR | os.O_CREAT)
        return made

    monkeypatch.setenv("VLLM_ENV_TEST_DATA", str(tmp_path))
    monkeypatch.setattr(models, "ensure_standin", make)
    assert models.small_standin(tmp_path / "environment") == made
