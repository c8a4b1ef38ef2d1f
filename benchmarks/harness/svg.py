"""Grouped bar charts as plain SVG, so that a benchmark needs no plotting library."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

_COLOURS = ("#9aa5b1", "#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2")
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 460, 260, 64, 40, 46


@dataclass(frozen=True)
class Panel:
    """One chart: `values[series][group]`, None where there is no figure."""

    title: str
    unit: str
    groups: list[str]
    values: dict[str, list[float | None]]


def draw(title: str, panels: list[Panel]) -> str:
    """Return an SVG with the panels two to a row and one legend."""
    rows = (len(panels) + 1) // 2
    height = 58 + rows * _HEIGHT
    series = list(dict.fromkeys(name for panel in panels for name in panel.values))
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(series)}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * _WIDTH} {height}" width="{2 * _WIDTH}">',
        "<style>text { font: 11px sans-serif }</style>",
        '<rect width="100%" height="100%" fill="white"/>',
        _text(_LEFT, 20, title, 'style="font: bold 14px sans-serif"'),
    ]
    for i, name in enumerate(series):
        x = _LEFT + 150 * i
        parts += [f'<rect x="{x}" y="30" width="11" height="11" fill="{colours[name]}"/>', _text(x + 16, 40, name)]
    for i, panel in enumerate(panels):
        parts.append(f'<g transform="translate({i % 2 * _WIDTH},{50 + i // 2 * _HEIGHT})">')
        parts += _panel(panel, colours)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, colours: dict[str, str]) -> list[str]:
    known = [value for values in panel.values.values() for value in values if value is not None]
    top = 4 * _step(max(known, default=1.0) / 4)
    inner = _HEIGHT - _TOP - _BOTTOM
    parts = [_text(_LEFT, _TOP - 16, f"{panel.title} ({panel.unit})", 'style="font-weight: bold"')]
    for step in range(5):
        y = _TOP + inner * (1 - step / 4)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - 12}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 6, y + 4, _number(top * step / 4), 'text-anchor="end"'))
    slot = (_WIDTH - 12 - _LEFT) / max(1, len(panel.groups))
    bar = slot * 0.8 / max(1, len(panel.values))
    for g, group in enumerate(panel.groups):
        left = _LEFT + slot * g
        parts.append(_text(left + slot / 2, _HEIGHT - _BOTTOM + 16, group, 'text-anchor="middle"'))
        for s, (name, values) in enumerate(panel.values.items()):
            value = values[g]
            if value is None:
                continue
            high = inner * value / top
            box = f'x="{left + slot * 0.1 + bar * s:.1f}" y="{_TOP + inner - high:.1f}" width="{bar * 0.94:.1f}"'
            tip = f"<title>{escape(name)}, {escape(group)}: {_number(value)} {escape(panel.unit)}</title>"
            parts.append(f'<rect {box} height="{high:.1f}" fill="{colours[name]}">{tip}</rect>')
    return parts


def _step(least: float) -> float:
    """Return the next round number of at least ``least``, so that ticks are easy to read."""
    if least <= 0:
        return 0.25
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if factor * power >= least)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
