"""What README and docs tell people to type."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def requests_in(page: Path) -> list[tuple[str, str]]:
    """Return the path and the body of each `curl` line of a page, as a shell would take them.

    Raises:
        AssertionError: One goes to another server than a local Triton.
    """
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    found = []
    for line in text.splitlines():
        if line.startswith("curl "):
            words = shlex.split(line)
            host, _, path = next(word for word in words if "/v2/" in word).partition("/")
            assert host == "localhost:8000", line
            found.append((f"/{path}", words[words.index("-d") + 1]))
    return found
