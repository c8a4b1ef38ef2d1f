"""Draw the chart of docs/speed.md from the results: our tokens per second next to ``vllm serve``.

    python3 benchmarks/speed_chart.py

It writes docs/pictures/speed-light.svg and speed-dark.svg. A test compares them with the results.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
REPORTS = {
    "one front end each, H200": "serving_h200_llama-7b-20261123-0619-d502e19",
    "two front ends each, H100": "serving_h100_llama-7b_count_2-20261127-2329-440b9965",
}
"""What a report measured, and its name in benchmarks/results."""
STREAMS = (32, 256)
_WIDTH, _BAR, _LEFT, _TOP = 800, 22, 290, 64
_SCALE = 270  # pixels for a ratio of 1


@dataclass(frozen=True)
class Colours:
    """The colours of one picture."""

    text: str
    faint: str
    ours: str
    theirs: str


COLOURS = {
    "light": Colours(text="#1f2328", faint="#59636e", ours="#0072B2", theirs="#afb8c1"),
    "dark": Colours(text="#f0f6fc", faint="#9198a1", ours="#56B4E9", theirs="#656c76"),
}


def main(arguments: list[str] | None = None) -> None:
    """Write both pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs" / "pictures", help="folder (default: %(default)s)"
    )
    out = parser.parse_args(arguments).out
    out.mkdir(parents=True, exist_ok=True)
    for name, colours in COLOURS.items():
        (out / f"speed-{name}.svg").write_text(draw(rows(), colours), encoding="utf-8")


def rows() -> list[tuple[str, list[float]]]:
    """Return each row's label and the ratio of every round."""
    return [
        (f"{label}, {streams} streams", ratios(report, streams))
        for label, report in REPORTS.items()
        for streams in STREAMS
    ]


def ratios(report: str, streams: int) -> list[float]:
    """Return our output tokens per second over those of ``vllm serve``, round by round.

    Args:
        report: the report's name, a value of ``REPORTS``.
        streams: only loads with so many streams count.
    """
    file = ROOT / "benchmarks" / "results" / f"{report}.json"
    # Target -> number of the round -> output tokens per second. In the reports, our target is
    # called triton, and ``vllm serve`` openai.
    speed: dict[str, dict[int, float]] = {"triton": {}, "openai": {}}
    for entry in json.loads(file.read_text("utf-8"))["rounds"]:
        if entry["cell"]["in_flight"] == streams and entry["target"] in speed:
            speed[entry["target"]][entry["number"]] = entry["measured"]["output_throughput"]
    return [ours / speed["openai"][number] for number, ours in speed["triton"].items()]


def draw(bars: list[tuple[str, list[float]]], colours: Colours) -> str:
    """Return an SVG: two bars for each row, ours with the least and the most of the rounds.

    Args:
        bars: each row's label and ratios, from ``rows``.
        colours: of the picture.
    """
    height = _TOP + len(bars) * (2 * _BAR + 18) + 12
    size = f'width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}"'
    title = "Tokens per second, vllm serve = 1.00"
    about = (
        "Llama-7B shape, streams of 128 tokens, vLLM 0.33.0. "
        "Median of the rounds; line: least to most."
    )
    large = 'font-size="17" font-weight="bold"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">',
        f"<title>{title}</title>",
        f'<text x="12" y="26" {large} fill="{colours.text}">{title}</text>',
        f'<text x="12" y="46" fill="{colours.faint}">{about}</text>',
    ]
    # The upper edge of the row, in pixels.
    y = _TOP
    for label, values in bars:
        middle = median(values)
        centre = y + _BAR / 2
        parts += [
            f'<text x="12" y="{y + _BAR + 5}" fill="{colours.text}">{escape(label)}</text>',
            _bar(y, middle, colours.ours),
            _line(min(values), max(values), centre, colours.text),
            _value(max(values), y, f"vllm-env {middle:.2f}", colours.text),
            _bar(y + _BAR, 1, colours.theirs),
            _value(1, y + _BAR, "vllm serve 1.00", colours.faint),
        ]
        y += 2 * _BAR + 18
    return "\n".join([*parts, "</svg>", ""])


def _bar(y: float, ratio: float, colour: str) -> str:
    width = f"{_SCALE * ratio:.1f}"
    return f'<rect x="{_LEFT}" y="{y}" width="{width}" height="{_BAR - 2}" fill="{colour}"/>'


def _line(least: float, most: float, y: float, colour: str) -> str:
    first, last = (f"{_LEFT + _SCALE * ratio:.1f}" for ratio in (least, most))
    return f'<path d="M{first} {y - 1:g}H{last}" stroke="{colour}" stroke-width="2"/>'


def _value(ratio: float, y: float, text: str, colour: str) -> str:
    x = f"{_LEFT + _SCALE * ratio + 8:.1f}"
    return f'<text x="{x}" y="{y + 15}" fill="{colour}">{text}</text>'


if __name__ == "__main__":
    main()
