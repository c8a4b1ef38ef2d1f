"""Changes to a copied model's files before it is served."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def with_parameter(model: Path, name: str, value: str) -> None:
    """Set a parameter in a model's config.pbtxt, in place of the one that is there."""
    config = model / "config.pbtxt"
    text = config.read_text(encoding="utf-8")
    without = re.sub(rf'parameters\s*{{\s*key: "{name}".*?}}\s*}}\s*', "", text, flags=re.DOTALL)
    entry = f'parameters {{\n  key: "{name}"\n  value: {{ string_value: "{value}" }}\n}}\n'
    config.write_text(f"{without}\n{entry}", encoding="utf-8")


def with_metrics(model: Path) -> None:
    """Turn REPORT_CUSTOM_METRICS on."""
    with_parameter(model, "REPORT_CUSTOM_METRICS", "yes")


def with_line(model: Path, line: str, *, after: str) -> None:
    """Put a line into a model's model.py, after the one line that is ``after``."""
    entry = model / "1" / "model.py"
    text = entry.read_text(encoding="utf-8")
    assert text.count(f"{after}\n") == 1
    entry.write_text(text.replace(f"{after}\n", f"{after}\n{line}\n"), encoding="utf-8")
