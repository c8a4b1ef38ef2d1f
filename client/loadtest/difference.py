"""How much two servers differ, from blocks of the same requests that they answered in turns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# Student's t for a two-sided interval of 95 %, by degrees of freedom from 1 to 19; tables of
# statistics have them. ``versus.BLOCKS`` pairs have 19 degrees.
_STUDENT_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093),
)


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
    both. The ratios are taken as log-normal, and each pair as independent of the others.

    Args:
        pairs: the figure in the first server's block and in the second one's; at most 20.

    Returns:
        None if there are fewer than two pairs with positive figures.
    """
    ratios = [math.log(second / first) for first, second in pairs if first > 0 and second > 0]
    if len(ratios) < 2:
        return None
    factor = _STUDENT_95[len(ratios) - 2]
    middle = fmean(ratios)
    half = factor * stdev(ratios) / math.sqrt(len(ratios))
    return Difference(
        estimate=math.expm1(middle),
        low=math.expm1(middle - half),
        high=math.expm1(middle + half),
        pairs=len(ratios),
    )
