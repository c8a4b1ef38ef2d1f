"""Fixtures around the small vLLM: an interpreter's channel that is made once, and a cache that starts with it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from support import small_build
from support.once import once
from vllm_env.base.cache import Cache
from vllm_env.base.network import Network
from vllm_env.base.workspace import Workspace
from vllm_env.interpreter.layer import CondaLayer, install_layer, local_layer
from vllm_env.prefix.strip import strip_symbols

if TYPE_CHECKING:
    from pathlib import Path

PYTHON = "3.11"


@dataclass(frozen=True)
class Channel:
    """A cache folder with the local channel of this machine's interpreter, and what it resolves to."""

    root: Path
    layer: CondaLayer

    @property
    def workspace(self) -> Workspace:
        """A workspace with this cache and no network."""
        return workspace_in(self.root)


def workspace_in(root: Path, network: Network | None = None) -> Workspace:
    """A workspace with the cache ``root``; without ``network``, it is offline."""
    return Workspace(Cache(root), network or Network(offline=True))


@pytest.fixture(scope="session")
def channel() -> Channel:
    """Made from an interpreter of this machine as on a machine without conda-forge; read it, do not change it."""

    def make(root: Path) -> Path:
        local_layer(workspace_in(root), PYTHON)
        return root

    root = once("channel", make)
    return Channel(root, local_layer(workspace_in(root), PYTHON))


@pytest.fixture(scope="session")
def bare_prefix(channel: Channel) -> Path:
    """A conda prefix with the interpreter alone; read it, do not change it."""

    def make(prefix: Path) -> Path:
        install_layer(channel.workspace, channel.layer, prefix)
        return prefix

    return once("bare/env", make)


def copy_slim(bare_prefix: Path, prefix: Path) -> None:
    """Copy the interpreter without what few programs need, as pruned and stripped prefixes are."""
    ignored = shutil.ignore_patterns("include", "asyncio", "distutils", "pydoc_data", "unittest", "xml", "_codecs_*")
    shutil.copytree(bare_prefix, prefix, symlinks=True, ignore=ignored)
    strip_symbols(prefix / f"lib/libpython{PYTHON}.so.1.0")


@pytest.fixture
def small_cache(channel: Channel, tmp_path: Path) -> Path:
    """A cache of a test's own that need not make the interpreter's package again."""
    root = tmp_path / "cache"
    shutil.copytree(channel.root / "conda" / "channel", root / "conda" / "channel")
    return root


@pytest.fixture(scope="session")
def small_tree() -> Path:
    """A source tree of a small vLLM in a git repository with one commit."""
    return once("source/vllm", lambda folder: small_build.make_tree(folder, git=True))


@pytest.fixture(scope="session")
def small_wheel(small_tree: Path) -> Path:
    """A wheel of the small vLLM."""
    return once("wheels", lambda folder: small_build.make_wheel(folder, small_tree))


@pytest.fixture
def small_spec(small_wheel: Path, tmp_path: Path) -> Path:
    """A spec file of a test's own that pins the small wheel."""
    return small_build.make_spec(tmp_path / "spec", small_wheel)
