"""benchmarks/speed_chart.py: the committed pictures are what it draws from the committed results."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest

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


def test_a_bar_is_as_long_as_its_ratio() -> None:
    """Ours is the median; the line goes from the least to the most."""
    import speed_chart

    drawn = speed_chart.draw([("one", [0.5, 1.0, 1.2, 1.3, 2.0])], speed_chart.COLOURS["light"])
    root = ET.fromstring(drawn)
    ours, theirs = (float(bar.attrib["width"]) for bar in root.iter("{http://www.w3.org/2000/svg}rect"))
    assert ours / theirs == pytest.approx(1.2)
    assert "vllm-env 1.20" in drawn
    assert len(speed_chart.rows()) == 4
