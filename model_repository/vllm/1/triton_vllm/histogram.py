"""Turn the growth of one of vLLM's histograms into observations for another one.

Triton's histogram takes one observation a call and nothing else. vLLM's registry says how many observations each bucket has
and what all of them sum up to; from the two follow observations that lie in the same buckets and have the same sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

MOST = 250
"""Observations of a histogram in a second: each is a round trip to the server."""
HELD = 60 * MOST
"""Observations that wait for later; of more than that each bucket keeps its share."""


@dataclass(frozen=True)
class Histogram:
    """What a histogram has observed so far.

    Attributes:
        name: without the suffixes of its samples.
        labels: without `le`.
        bounds: the finite upper bounds of the buckets, ascending.
        counts: observations of each bucket alone, and of the one without a bound.
        total: of all observations.
        help: its description.
    """

    name: str
    labels: tuple[tuple[str, str], ...]
    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float
    help: str


class Replay:
    """The observations of one histogram that have not been replayed.

    Args:
        period: seconds between two calls.
    """

    def __init__(self, period: float = 1.0) -> None:
        self._period = period
        self._allowed = float(MOST)
        self._counts: tuple[int, ...] = ()
        self._total = 0.0
        self._waiting: list[int] = []
        self._sum = 0.0

    def take(self, now: Histogram) -> list[float]:
        """Return what has been observed since the last call, at most `MOST` in a second: values in its buckets, with its sum.

        Counts that have fallen are those of a restarted engine, and begin at zero.
        """
        before = self._counts or (0,) * len(now.counts)
        restarted = any(new < old for new, old in zip(now.counts, before, strict=True))
        if restarted:
            before, self._total = (0,) * len(now.counts), 0.0
        grown = [new - old for new, old in zip(now.counts, before, strict=True)]
        self._waiting = [a + b for a, b in zip(self._waiting or [0] * len(grown), grown, strict=True)]
        self._sum += now.total - self._total
        self._counts, self._total = now.counts, now.total
        ranges = _ranges(now.bounds, self._waiting, self._sum)
        if sum(self._waiting) > HELD:
            self._thin(ranges)
        return self._draw(ranges)

    def _thin(self, ranges: list[tuple[float, float]]) -> None:
        """Keep of each bucket its share of `HELD`, and what these sum up to at the same place between least and most."""
        part = self._part(ranges)
        self._waiting = _shares(self._waiting, HELD)
        least, most = self._extremes(ranges)
        total = least + part * (most - least)
        self._sum = float(round(total)) if self._sum.is_integer() else total

    def _draw(self, ranges: list[tuple[float, float]]) -> list[float]:
        """Take as many observations as are allowed, of each bucket its share, out of those that wait."""
        drawn: list[float] = []
        for i, count in enumerate(_shares(self._waiting, int(self._allowed))):
            for _ in range(count):
                value = self._value(i, ranges)
                self._waiting[i] -= 1
                self._sum -= value
                drawn.append(value)
        self._allowed = min(self._allowed - len(drawn) + MOST * self._period, float(MOST))
        if not any(self._waiting):
            self._sum = 0.0  # what rounding has left
        return drawn

    def _value(self, i: int, ranges: list[tuple[float, float]]) -> float:
        """Return a value of bucket `i`: as far between its least and its largest as the sum of those that wait is."""
        low, high = ranges[i]
        value = low + self._part(ranges) * (high - low)
        if low.is_integer() and high.is_integer():
            value = float(round(value))
        return min(max(value, low), high)

    def _extremes(self, ranges: list[tuple[float, float]]) -> tuple[float, float]:
        """Return the least and the largest sum that those that wait can have."""
        least = sum(n * low for n, (low, _) in zip(self._waiting, ranges, strict=True) if n)
        most = sum(n * high for n, (_, high) in zip(self._waiting, ranges, strict=True) if n)
        return least, most

    def _part(self, ranges: list[tuple[float, float]]) -> float:
        """Return where between these two their sum is, from 0 to 1."""
        least, most = self._extremes(ranges)
        part = (self._sum - least) / (most - least) if most > least else 0.0
        return min(max(part, 0.0), 1.0)


def _shares(counts: list[int], most: int) -> list[int]:
    """Return how many of each count are taken if `most` of all are."""
    total = sum(counts)
    if total <= most:
        return list(counts)
    ends = [end * most // total for end in accumulate(counts)]
    return [end - begin for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def _ranges(bounds: tuple[float, ...], counts: list[int], total: float) -> list[tuple[float, float]]:
    """Return the least and the largest value of each bucket; whole numbers where bounds and sum are."""
    whole = total.is_integer() and all(bound.is_integer() for bound in bounds)
    lows = [0.0, *(bound + 1 if whole else math.nextafter(bound, math.inf) for bound in bounds)]
    least = sum(count * low for count, low in zip(counts, lows, strict=True))
    return list(zip(lows, [*bounds, lows[-1] + max(total - least, 0.0)], strict=True))
