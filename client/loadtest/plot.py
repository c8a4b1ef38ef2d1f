"""Draw a run as SVG: how the latencies are distributed, and the speed over time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from loadtest.measures import Measures
    from loadtest.samples import Samples

    Points = Sequence[tuple[float, float]]

_WIDTH = 640
_HEIGHT = 300
_LEFT = 70
_TOP = 40
_RIGHT = 20
_BOTTOM = 50
_NAME_WIDTH = 60
_TICKS = 5
# Colours that people with any kind of colour vision can tell apart (Okabe and Ito).
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")


def draw(measures: Measures, title: str, *, without: Collection[str] = ()) -> str:
    """Return the picture of a run.

    Args:
        measures: the figures.
        title: the heading.
        without: names of the times that are not drawn, such as ``tpot``.
    """
    latencies = {"ttft": measures.ttft, "e2el": measures.e2el, "tpot": measures.tpot}
    lines = {
        name.upper(): _shares(samples)
        for name, samples in latencies.items()
        if samples.count > 1 and name not in without
    }
    seconds = range(max(measures.pieces_in, default=0) + 1)
    # Each second is a step with a beginning and an end.
    speed = [
        (float(second + edge), float(measures.pieces_in.get(second, 0)))
        for second in seconds
        for edge in (0, 1)
    ]
    panels = (
        Panel("Share of answers that were at least so fast", "ms", "%", lines),
        Panel("Pieces per second", "s", "pieces/s", {"pieces": speed}),
    )
    size = f'width="{_WIDTH}" height="{2 * _HEIGHT + _TOP}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="16">{escape(title)}</text>',
    ]
    for number, panel in enumerate(panels):
        top = _TOP + number * _HEIGHT
        parts.append(f'<g transform="translate(0,{top})">{panel.draw()}</g>')
    return "\n".join([*parts, "</svg>", ""])


def _shares(samples: Samples) -> Points:
    """Return milliseconds and the percentage of values that are not longer."""
    return [(samples.percentile(percent) * 1e3, float(percent)) for percent in range(101)]


@dataclass(frozen=True)
class Panel:
    """One diagram.

    Attributes:
        title: the heading.
        x: the unit of the horizontal axis.
        y: the unit of the vertical axis.
        lines: points by the name of their line.
    """

    title: str
    x: str
    y: str
    lines: Mapping[str, Points]

    def draw(self) -> str:
        """Return the diagram as elements of SVG.

        SVG counts from the upper left corner down.
        """
        points = [point for line in self.lines.values() for point in line]
        most_x = _round_up(max((x for x, _ in points), default=1.0))
        most_y = _round_up(max((y for _, y in points), default=1.0))
        wide = _WIDTH - _LEFT - _RIGHT
        high = _HEIGHT - _TOP - _BOTTOM
        bottom = _TOP + high
        # 1) The grid with its numbers, and the units
        parts = [f'<text x="{_LEFT}" y="{_TOP - 10}">{escape(self.title)}</text>']
        for tick in range(_TICKS + 1):
            share = tick / _TICKS
            x = _LEFT + share * wide
            y = bottom - share * high
            parts.append(f'<path d="M{_LEFT} {y:.1f}h{wide}" stroke="#ddd"/>')
            parts.append(_label(_LEFT - 6, y + 4, f"{share * most_y:g}", anchor="end"))
            parts.append(_label(x, bottom + 16, f"{share * most_x:g}"))
        parts.append(_label(_LEFT + wide / 2, bottom + 34, self.x))
        parts.append(_label(_LEFT - 6, _TOP - 10, self.y, anchor="end"))
        # 2) The lines, and their names side by side in the upper right corner
        for number, (name, line) in enumerate(self.lines.items()):
            colour = _COLOURS[number % len(_COLOURS)]
            path = " ".join(
                f"{_LEFT + x / most_x * wide:.1f},{bottom - y / most_y * high:.1f}" for x, y in line
            )
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}"/>')
            name_end = _LEFT + wide - _NAME_WIDTH * (len(self.lines) - number - 1)
            parts.append(_label(name_end, _TOP - 10, name, anchor="end", colour=colour))
        return "\n".join(parts)


def _label(x: float, y: float, text: str, *, anchor: str = "middle", colour: str = "black") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"'
    return f"<text {place}>{escape(text)}</text>"


def _round_up(value: float) -> float:
    """Return the next number that is 1, 2, 2.5 or 5 times 10^n: its fifths are short to write."""
    if value <= 0:
        return 1.0
    power: float = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if value <= step * power * (1 + 1e-9))
