"""How much two servers differ, from blocks of the same requests that they answered in turns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations_with_replacement
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# With fewer pairs, no interval has 95 %: all pairs of equal servers have the same sign by chance
# in 2 of 2^5 cases.
FEWEST_PAIRS = 6
_OUTSIDE = 0.05


@dataclass(frozen=True)
class Difference:
    """The second server's figure relative to the first one's: 0.05 is 5 % more.

    Attributes:
        estimate: the most likely difference.
        low: lower end of the 95 % interval.
        high: upper end of the 95 % interval.
        pairs: number of pairs with positive figures.
    """

    estimate: float
    low: float
    high: float
    pairs: int


def difference(pairs: Sequence[tuple[float, float]]) -> Difference | None:
    """Return the relative difference of a figure with its interval.

    Each pair is of neighbouring blocks, so that what slows the machine down for a while concerns
    both. Which server's block comes first is drawn by lot. So for equal servers the logarithm of
    the ratio has either sign equally often. The estimate is that of Hodges and Lehmann, and the
    interval is that of Wilcoxon's signed-rank test. The test assumes nothing else about the
    figures. On a machine with other work, some blocks are slower by far. They would make the
    interval of a mean wide.

    Args:
        pairs: the figure in the first server's block and in the second one's.

    Returns:
        None if there are fewer than ``FEWEST_PAIRS`` pairs with positive figures.
    """
    ratios = [math.log(second / first) for first, second in pairs if first > 0 and second > 0]
    if len(ratios) < FEWEST_PAIRS:
        return None
    # Walsh's averages: of each two ratios, and of each with itself.
    averages = sorted((a + b) / 2 for a, b in combinations_with_replacement(ratios, 2))
    outside = _averages_outside(len(ratios))
    return Difference(
        estimate=math.expm1(median(averages)),
        low=math.expm1(averages[outside]),
        high=math.expm1(averages[-1 - outside]),
        pairs=len(ratios),
    )


def _averages_outside(count: int) -> int:
    """Return how many of the sorted averages lie outside of the 95 % interval, on each side.

    It is the largest rank sum that the signed-rank test of ``count`` pairs rejects.
    """
    # ways[sum]: how many subsets of the ranks 1 to ``count`` have this sum. For equal servers, the
    # ranks of the positive ratios are any subset, each as likely as the others.
    ways = [1]
    for rank in range(1, count + 1):
        longer = [*ways, *[0] * rank]
        for total, number in enumerate(ways):
            longer[total + rank] += number
        ways = longer
    # Sums up to the end of the interval may have at most this many subsets: 2.5 % of all.
    allowed = _OUTSIDE / 2 * 2**count
    seen = 0
    for total, number in enumerate(ways):
        seen += number
        if seen > allowed:
            # The end of the interval is the first average that is not rejected.
            return total - 1
    raise AssertionError("all subsets are more than the allowed share")
