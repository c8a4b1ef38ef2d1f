"""Parts that are unpacked in milliseconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.small_parts import Small, make_small

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def small(tmp_path: Path) -> Small:
    """A small archive and three parts."""
    return make_small(tmp_path)
