"""Each patch of something private of vLLM, torch or Python is still needed, and still works (docs/vllm_versions.md).

A probe that finds nothing wrong without its patch says that the patch may go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.patch_probes import PROBES
from support.reference import run_reference
from support.repositories import CHECKOUT

if TYPE_CHECKING:
    from pathlib import Path

    from support.serving import Parts

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def found(parts: Parts, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What is wrong with and without each patch."""
    cache: Path = tmp_path_factory.mktemp("patches")
    code = CHECKOUT / "model_repository" / "vllm" / "1"
    request = {"code": str(code), "model": str(parts.standin), "cache": str(cache)}
    answer: dict[str, dict[str, str]] = run_reference(parts.environment, "patch_probes.py", request)
    return answer


@pytest.mark.parametrize("patch", PROBES)
def test_a_patch_works_and_is_needed(found: dict[str, dict[str, str]], patch: str) -> None:
    """Its probe finds a fault in the pinned vLLM, and none with the patch."""
    assert found[patch]["with"] == ""
    assert found[patch]["without"] != "", f"vLLM works without the patch {patch}: remove it"
