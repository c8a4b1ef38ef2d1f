"""The build and its cache: what killed builds left, and what eviction leaves."""

from __future__ import annotations

import os
from functools import partialmethod
from typing import TYPE_CHECKING

import pytest

from support.build_stages import Stages, build_all
from support.small_fixtures import workspace_in
from triton_vllm.startup import warm_cache
from vllm_env.base.cache import Cache, default_root
from vllm_env.build import build
from vllm_env.sketch import BuildRequest

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_env.base.workspace import Workspace


def test_what_a_killed_build_staged_is_removed_first(stages: Stages, workspace: Workspace, request_: BuildRequest) -> None:
    """It may have staged gigabytes."""
    left = workspace.cache.path("build", "vllm_env-abcd_123")
    (left / "env").mkdir(parents=True)
    build(workspace, request_)
    assert not left.exists()


def test_a_build_keeps_its_own_entries(
    stages: Stages, workspace: Workspace, request_: BuildRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However full the cache is; others go."""
    other = workspace.cache.path("prefixes", "other")
    other.mkdir(parents=True)
    (other / "file").write_text("x")
    monkeypatch.setattr("vllm_env.serve.leftovers._servers", list)
    monkeypatch.setattr(Cache, "evict", partialmethod(Cache.evict, limit=0))
    build_all(workspace, request_)
    assert not other.exists()
    assert workspace.cache.path("prefixes", "p", "env", "bin", "python").is_file()
    assert workspace.cache.path("archives", "k.tar.gz").is_file()


@pytest.mark.usefixtures("stages")
@pytest.mark.parametrize("serves", [True, False])
def test_eviction_leaves_a_running_servers_caches(
    tmp_path: Path, request_: BuildRequest, monkeypatch: pytest.MonkeyPatch, serves: bool
) -> None:
    """A start marks its copy as used, and weeks later vLLM still reads a file there whenever it meets a new shape."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("vllm_env.serve.leftovers._servers", lambda: [(os.getuid(), 0.0)] if serves else [])
    monkeypatch.setattr(Cache, "evict", partialmethod(Cache.evict, limit=1_500_000))
    (tmp_path / "vllm_cache").mkdir()
    (tmp_path / "vllm_cache" / warm_cache.RECORD_NAME).write_bytes(b"x" * 1_000_000)
    copy = warm_cache.private_copy(tmp_path / "vllm_cache", warm_cache.Record("", "", (), ""), os.environ)
    workspace = workspace_in(default_root())
    prefix = workspace.cache.path("prefixes", "newer")
    prefix.mkdir(parents=True)
    (prefix / "file").write_bytes(b"x" * 1_000_000)
    os.utime(copy, (1, 1))
    os.utime(prefix, (2, 2))
    build_all(workspace, request_)
    assert (copy.exists(), prefix.exists()) == (serves, not serves)
