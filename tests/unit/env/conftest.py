"""A build whose long stages are stood in for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.build_stages import Stages
from support.small_fixtures import workspace_in
from vllm_env import build as module
from vllm_env.plan import BuildRequest

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_env.base.workspace import Workspace


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stages:
    """Stages that end well."""
    made = Stages(tmp_path)
    for name in ("make_plan", "make_prefix", "make_stub", "make_archive", "verify_archive", "verify_directory"):
        monkeypatch.setattr(module, name, getattr(made, name))
    for name in ("has_prefix", "ensure_standin", "is_fetchable", "smoke_run", "warm"):
        monkeypatch.setattr(module, name, getattr(made, name))
    real = module.publish

    def observed(*arguments: object) -> Path:
        made._call("publish")
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "publish", observed)
    return made


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """An empty cache, no network."""
    return workspace_in(tmp_path / "cache")


@pytest.fixture
def request_(tmp_path: Path) -> BuildRequest:
    """A build with its smoke run."""
    return BuildRequest(repository=tmp_path / "models")
