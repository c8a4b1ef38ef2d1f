"""The folders of the tests of ``adopt``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.official_folder import make_official

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def official(tmp_path: Path) -> Path:
    """A model folder of the official backend."""
    return make_official(tmp_path / "theirs" / "opt")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Where the new model will be."""
    return tmp_path / "place" / "models" / "opt"
