"""loadtest.plot: the picture has the figures where they belong."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from loadtest.measures import Measures
from loadtest.plot import draw
from loadtest.record import Outcome, Record, Request

SVG = "{http://www.w3.org/2000/svg}"


def run_of(answers: int) -> Measures:
    """Return a run in which each answer has three pieces, after 100, 200 and 400 ms, and two start in each second."""
    measures = Measures()
    for number in range(answers):
        sent = number / 2
        request = Request(number, "", {}, stream=True)
        times = [sent + 0.1, sent + 0.2, sent + 0.4]
        measures.add(Record(request, due=sent, sent=sent, times=times, output_tokens=3, outcome=Outcome.ANSWERED))
    return measures


def lines_of(picture: str) -> list[list[tuple[float, ...]]]:
    found = ElementTree.fromstring(picture).iter(f"{SVG}polyline")
    return [[tuple(map(float, point.split(","))) for point in line.attrib["points"].split()] for line in found]


def test_lines_are_where_their_figures_are() -> None:
    """TTFT is 100 ms and E2EL 400 ms of a scale to 500 ms: a fifth and four fifths of 550 pixels; 6 pieces in each second."""
    ttft, e2el, tpot, speed = lines_of(draw(run_of(8), "a < b"))
    for line, place in ((ttft, 110), (e2el, 440), (tpot, 165)):
        assert [x for x, _ in line] == pytest.approx([70 + place] * 101, abs=0.1)
    assert (ttft[0][1], ttft[-1][1]) == (250.0, 40.0)
    assert [y for _, y in speed] == pytest.approx([250 - 6 / 10 * 210] * 8, abs=0.1)
    assert [x for x, _ in speed] == pytest.approx([70 + 550 * second / 5 for second in (0, 1, 1, 2, 2, 3, 3, 4)], abs=0.1)
