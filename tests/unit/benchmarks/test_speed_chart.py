"""benchmarks/speed_chart.py: the committed pictures are what it draws from the committed results."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from support.repositories import CHECKOUT

if TYPE_CHECKING:
    from pathlib import Path

PICTURES = CHECKOUT / "docs" / "pictures"


def test_the_committed_pictures_are_those_of_the_command(tmp_path: Path) -> None:
    """If this fails, run `python3 benchmarks/speed_chart.py`."""
    import speed_chart

    speed_chart.main(["--out", str(tmp_path)])
    for name in ("speed-light.svg", "speed-dark.svg"):
        drawn = (tmp_path / name).read_text("utf-8")
        assert ET.fromstring(drawn).tag.endswith("svg")
        assert (PICTURES / name).read_text("utf-8") == drawn
