"""How many instances of a model Triton starts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def with_instances(model: Path, count: int) -> None:
    """Set the count of the one instance group in a model's config.pbtxt."""
    config = model / "config.pbtxt"
    changed, found = re.subn(r"(instance_group\s*\[\s*\{\s*count:\s*)\d+", rf"\g<1>{count}", config.read_text(encoding="utf-8"))
    assert found == 1
    config.write_text(changed, encoding="utf-8")
