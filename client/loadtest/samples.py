"""Percentiles of any number of values in little memory."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

# Up to this number, all values are kept and percentiles are exact.
EXACT_LIMIT = 100_000
# Upper edge of a histogram's bucket divided by the lower one. A value in the middle then differs
# from the bucket's others by less than 1 %.
_RATIO = 1.01
_LOG_RATIO = math.log(_RATIO)
# Seconds. Shorter times count as zero: no clock here resolves them.
_SHORTEST = 1e-7


@dataclass
class Samples:
    """Times in seconds: all of them, or above ``EXACT_LIMIT`` a histogram.

    Mean and standard deviation are exact in either case.
    """

    count: int = 0
    _total: float = 0.0
    _squares: float = 0.0
    _values: array[float] = field(default_factory=lambda: array("d"))
    # Number of values by bucket; the bucket -1 holds zero.
    _buckets: dict[int, int] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """Return whether percentiles are exact, and not from a histogram."""
        return not self._buckets

    def extend(self, values: Sequence[float]) -> None:
        """Add values."""
        self.count += len(values)
        for value in values:
            self._total += value
            self._squares += value * value
        self._values.extend(values)
        if len(self._values) > EXACT_LIMIT:
            self._move_to_histogram()

    def mean(self) -> float:
        """Return the mean; 0 if there are no values."""
        return self._total / self.count if self.count else 0.0

    def deviation(self) -> float:
        """Return the standard deviation of these values, or 0 without values."""
        if not self.count:
            return 0.0
        if self.exact:
            return float(np.std(self._values))
        return math.sqrt(max(0.0, self._squares / self.count - self.mean() ** 2))

    def percentile(self, percent: float, *, infinite: int = 0) -> float:
        """Return a percentile, interpolated between two values as ``vllm bench serve`` does.

        Args:
            percent: from 0 to 100.
            infinite: number of further values that are infinite, such as those of failed requests.

        Returns:
            seconds; 0 if there are no values at all.
        """
        total = self.count + infinite
        if not total:
            return 0.0
        # The position in the sorted values; it may lie between two of them.
        position = (total - 1) * percent / 100
        below = math.floor(position)
        above = math.ceil(position)
        # The infinite values come last.
        if above >= self.count:
            return math.inf
        if not self.exact:
            # This adds the values that have come since the last time.
            self._move_to_histogram()
            lower = self._value_of_rank(below)
            upper = self._value_of_rank(above)
        else:
            ordered = np.partition(self._values, (below, above))
            lower = float(ordered[below])
            upper = float(ordered[above])
        return lower + (upper - lower) * (position - below)

    def _move_to_histogram(self) -> None:
        """Count all kept values in the histogram's buckets, and drop them.

        Bucket n begins at ``_SHORTEST * _RATIO ** n``. Bucket -1 is for all times up to
        ``_SHORTEST``.
        """
        values = np.array(self._values)
        self._values = array("d")
        numbers = np.full(len(values), -1)
        positive = values > _SHORTEST
        numbers[positive] = np.log(values[positive] / _SHORTEST) / _LOG_RATIO
        found, counts = np.unique(numbers, return_counts=True)
        for number, count in zip(found.tolist(), counts.tolist(), strict=True):
            self._buckets[number] = self._buckets.get(number, 0) + count

    def _value_of_rank(self, rank: int) -> float:
        """Return from the histogram about the value that ``rank`` smaller ones precede."""
        seen = 0
        bucket = -1
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen > rank:
                break
        # The middle of the bucket.
        return 0.0 if bucket < 0 else _SHORTEST * _RATIO ** (bucket + 0.5)
