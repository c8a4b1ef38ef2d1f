"""loadtest.difference: the interval is as wide as it must be, and no wider."""

from __future__ import annotations

import math
import random

import pytest

from loadtest.difference import FEWEST_PAIRS, Difference, difference
from loadtest.versus import MOST_BLOCKS, block_sizes


def pairs(source: random.Random, *, factor: float = 1.0, count: int = 10) -> list[tuple[float, float]]:
    """Return figures of neighbouring blocks: a machine that slows down and speeds up, and 5 % of noise in each."""
    found = []
    for _ in range(count):
        machine = math.exp(source.gauss(0, 0.3))
        first, second = (100 * machine * math.exp(source.gauss(0, 0.02)) for _ in range(2))
        found.append((first, second * factor))
    return found


def test_known_blocks_have_a_known_interval() -> None:
    """Six pairs: the interval are the least and the largest ratio, and the estimate is the median of the averages."""
    found = difference([(1.0, 1.0), (1.0, 1.1), (2.0, 2.42), (1.0, 0.9), (1.0, 1.05), (1.0, 1.2)])
    assert found
    logarithms = [math.log(ratio) for ratio in (1.0, 1.1, 1.21, 0.9, 1.05, 1.2)]
    averages = sorted((a + b) / 2 for number, a in enumerate(logarithms) for b in logarithms[number:])
    assert len(averages) == 21
    assert [found.estimate, found.low, found.high] == pytest.approx([math.expm1(averages[10]), -0.1, 0.21])


def test_too_few_blocks_have_none() -> None:
    """A figure that is zero, as TPOT is of whole answers, has no ratio."""
    assert difference([(1.0, 1.1)] * (FEWEST_PAIRS - 1)) is None
    assert difference([(0.0, 0.0)] * 10) is None
    assert difference([(1.0, 1.0)] * MOST_BLOCKS) == Difference(0.0, 0.0, 0.0, MOST_BLOCKS)
    assert difference([(1.0, 1.0), (0.0, 1.0)] * 6) == Difference(0.0, 0.0, 0.0, 6)


@pytest.mark.parametrize(
    ("count", "in_flight", "blocks", "size"),
    [
        (40, 2, 20, 2),
        (640, 8, 20, 32),
        (1280, 8, 40, 32),
        (10_000, 8, 40, 250),
        (7, 1, 7, 1),
        (1000, 256, 20, 50),
        (30, 1, 20, 1),
    ],
)
def test_a_run_has_as_many_blocks_as_are_useful(count: int, in_flight: int, blocks: int, size: int) -> None:
    """All requests are in one; short blocks first, and then as many as have four rounds of what is in flight."""
    sizes = block_sizes(count, in_flight)
    assert (len(sizes), min(sizes), sum(sizes)) == (blocks, size, count)
