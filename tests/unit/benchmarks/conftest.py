"""The benchmarks' own modules, which are no package of the checkout, and a model repository for them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from support.repositories import CHECKOUT

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a model repository that looks built."""
    model = tmp_path / "built" / "vllm"
    model.mkdir(parents=True)
    (model / "config.pbtxt").touch()
    manifest = {"vllm": {"version": "0.32.0", "commit": ""}, "versions": {"torch": "2.13.0+cpu", "numpy": "1.26.4"}}
    (model / "vllm_env.json").write_text(json.dumps(manifest))
    return model.parent


@pytest.fixture(autouse=True)
def _benchmarks_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(CHECKOUT / "benchmarks")
