"""What the client's tests share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.client_run import PROMPTS

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A file with two prompts."""
    path = tmp_path / "prompts.txt"
    path.write_text(PROMPTS)
    return path
