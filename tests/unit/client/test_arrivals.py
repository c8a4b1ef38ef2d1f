"""loadtest.arrivals: the times are a Poisson process, or burstier or more even than one."""

from __future__ import annotations

from itertools import pairwise
from statistics import mean, pstdev

import numpy as np
import pytest

from loadtest.arrivals import arrival_times


def gaps(burstiness: float = 1.0, seed: int = 0) -> list[float]:
    times = [0.0, *arrival_times(count=5000, rate=100.0, seed=seed, burstiness=burstiness)]
    return [later - earlier for earlier, later in pairwise(times)]


def test_a_burstiness_of_one_is_a_poisson_process() -> None:
    """Kolmogorov-Smirnov: the gaps are exponential, and one does not tell the next; at 1 in 1000 of being wrong."""
    for seed in range(3):
        found = np.sort(gaps(seed=seed))
        expected = 1 - np.exp(-found * 100.0)
        steps = np.arange(len(found) + 1) / len(found)
        distance = max(np.max(steps[1:] - expected), np.max(expected - steps[:-1]))
        assert distance < 1.95 / np.sqrt(len(found))
        there = gaps(seed=seed)
        assert abs(np.corrcoef(there[:-1], there[1:])[0, 1]) < 3.3 / np.sqrt(len(there))


@pytest.mark.parametrize(("burstiness", "spread"), [(0.25, 2.0), (1.0, 1.0), (4.0, 0.5), (float("inf"), 0.0)])
def test_the_burstiness_is_the_shape_of_a_gamma_distribution(burstiness: float, spread: float) -> None:
    """Its deviation is the mean divided by the root of the shape; the rate stays."""
    found = gaps(burstiness)
    assert mean(found) == pytest.approx(0.01, rel=0.02)
    assert pstdev(found) == pytest.approx(0.01 * spread, rel=0.1, abs=1e-9)
