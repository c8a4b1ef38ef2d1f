"""docs/openai.md has what the code has."""

from __future__ import annotations

import re
from pathlib import Path

from triton_vllm.openai.fields import REFUSED, ROUTES

PAGE = Path(__file__).parents[4] / "docs" / "openai.md"


def test_the_page_has_the_paths_and_the_refused_fields() -> None:
    """Each path, and each field that no request may have."""
    text = PAGE.read_text("utf-8")
    table = text.split("\n## Paths\n")[1].split("\n\nAll other")[0]
    assert set(re.findall(r"`(/[\w/]*)`", table)) == ROUTES.keys()
    refused = text.split("So are these:")[1].split(". A value")[0]
    assert set(re.findall(r"`(\w+)`", refused)) == REFUSED.keys()
