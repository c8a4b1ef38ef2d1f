"""The manifest: written, read back, and refused when damaged."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from support.small_build import small_lock
from vllm_env.base.errors import VllmEnvError
from vllm_env.prefix.prune import Pruned
from vllm_env.publish.manifest import MANIFEST_NAME, Manifest, describe_build, read_manifest
from vllm_env.triton.root import TritonRoot, rules_of
from vllm_env.triton.stub import Stub

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """A build's manifest."""
    return describe_build(
        key="k",
        layout="archive",
        lock=small_lock(commit="c" * 40),
        triton=TritonRoot(tmp_path, "24.10", rules_of("24.10")),
        stub=Stub(tmp_path / "stub", "3.11", "24.10", "d" * 64, 7, "prebuilt"),
        archive={"name": "vllm_env.tar.gz", "sha256": "e" * 64, "size": 3, "members": 1, "unpacked": 10},
        pruned=(Pruned("tests", 2, 30),),
        built_at="2026-01-01T00:00:00+00:00",
    )


def test_what_was_pinned_and_built_is_told(manifest: Manifest) -> None:
    """vLLM with its commit, Python, torch and NumPy, the stub's and the archive's digests."""
    assert manifest.vllm["version"] == "0.99.0"
    assert manifest.vllm["commit"] == "c" * 40
    assert manifest.vllm["distribution"] == "vllm"
    assert manifest.python == "3.11.7"
    assert manifest.versions == {"numpy": "1.26.4", "setuptools": "84.2.1"}
    assert manifest.stub["sha256"] == "d" * 64
    assert manifest.left_out == [{"rule": "tests", "files": 2, "size": 30}]


def test_it_survives_the_file(manifest: Manifest, tmp_path: Path) -> None:
    """What is read is what was written, and equal manifests are equal text."""
    (tmp_path / MANIFEST_NAME).write_text(manifest.to_json())
    assert read_manifest(tmp_path) == manifest
    assert read_manifest(tmp_path).to_json() == manifest.to_json()  # type: ignore[union-attr]


def test_no_manifest_is_none(tmp_path: Path) -> None:
    """A folder that was never built is no error."""
    assert read_manifest(tmp_path) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 1, "unknown": 2}'])
def test_a_damaged_manifest_says_so(tmp_path: Path, text: str) -> None:
    """A cut-off or foreign file is named, with what to do."""
    (tmp_path / MANIFEST_NAME).write_text(text)
    with pytest.raises(VllmEnvError, match="damaged") as caught:
        read_manifest(tmp_path)
    assert caught.value.remedy


def test_another_format_is_not_misread(manifest: Manifest, tmp_path: Path) -> None:
    """A manifest of a newer tool is refused by its number."""
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(json.loads(manifest.to_json()) | {"format": 99}))
    with pytest.raises(VllmEnvError, match="format 99"):
        read_manifest(tmp_path)
