"""loadtest.difference: the interval is as wide as it must be, and no wider."""

from __future__ import annotations

import math
import random

import pytest

from loadtest.difference import Difference, difference
from loadtest.versus import BLOCKS


def pairs(source: random.Random, *, factor: float = 1.0, count: int = 10) -> list[tuple[float, float]]:
    """Return figures of neighbouring blocks: a machine that slows down and speeds up, and 5 % of noise in each."""
    found = []
    for _ in range(count):
        machine = math.exp(source.gauss(0, 0.3))
        first, second = (100 * machine * math.exp(source.gauss(0, 0.02)) for _ in range(2))
        found.append((first, second * factor))
    return found


def test_the_interval_of_equal_servers_contains_zero() -> None:
    """In 95 % of the runs: of 2000 in 1900, and 40 more or fewer are four deviations."""
    source = random.Random(3)
    found = [difference(pairs(source)) for _ in range(2000)]
    contained = sum(1 for each in found if each and each.low <= 0 <= each.high)
    assert 1860 <= contained <= 1940


def test_a_slower_server_is_found() -> None:
    """5 % of delay in most runs, although the machine itself changes by 30 % from block to block."""
    source = random.Random(4)
    found = [difference(pairs(source, factor=1.05)) for _ in range(200)]
    assert sum(1 for each in found if each and each.low > 0) > 150


def test_known_blocks_have_a_known_interval() -> None:
    """ln 1.1 and ln 1.21: the mean, and 12.706 standard errors with one degree of freedom."""
    found = difference([(1.0, 1.1), (2.0, 2.42)])
    assert found
    middle = 1.5 * math.log(1.1)
    half = 12.706 * 0.5 * math.log(1.1)
    expected = [math.expm1(middle), math.expm1(middle - half), math.expm1(middle + half)]
    assert [found.estimate, found.low, found.high] == pytest.approx(expected)


def test_too_few_blocks_have_none() -> None:
    """A figure that is zero, as TPOT is of whole answers, has no ratio."""
    assert difference([(1.0, 1.1)]) is None
    assert difference([(0.0, 0.0)] * 10) is None
    assert difference([(1.0, 1.0)] * BLOCKS) == Difference(0.0, 0.0, 0.0, BLOCKS)
    assert difference([(1.0, 1.0), (0.0, 1.0), (1.0, 1.0)]) == Difference(0.0, 0.0, 0.0, 2)
