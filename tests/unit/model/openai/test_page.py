"""docs/openai.md has what the code has."""

from __future__ import annotations

import re
from pathlib import Path

from triton_vllm.openai.fields import REFUSED, ROUTES

PAGE = Path(__file__).parents[4] / "docs" / "openai.md"


def test_the_page_has_the_paths_and_the_refused_fields() -> None:
    """Each path, and each field that no request may have."""
    text = PAGE.read_text("utf-8")
    table = text.split("\n## Paths\n")[1].split("\n\n<!--")[0]
    assert set(re.findall(r"`(/[\w/]*)`", table)) == ROUTES.keys()
    everywhere, responses = (
        text.split("unless their value is")[1].split("The answer has the reason")[0].split("In `/v1/responses`")
    )
    names = [set(re.findall(r"`(\w+)`", part)) for part in (everywhere.partition(":")[2], responses)]
    assert names == [REFUSED.keys(), ROUTES["/v1/responses"].refused.keys()]
