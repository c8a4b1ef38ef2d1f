"""loadtest.samples: percentiles as NumPy has them, and within one percent when there are many values."""

from __future__ import annotations

import math

import numpy as np
import pytest

from loadtest import samples
from loadtest.samples import Samples

PERCENTS = (0, 1, 50, 90, 99, 99.9, 100)


def filled(values: list[float]) -> Samples:
    found = Samples()
    for value in values:
        found.extend([value])
    return found


def test_percentiles_are_those_of_numpy() -> None:
    """Which `vllm bench serve` uses; also of one value and of two."""
    values = np.random.default_rng(1).lognormal(-3, 1, 999).tolist()
    for part in (values, values[:1], values[:2]):
        found = filled(part)
        assert found.exact
        assert [found.percentile(p) for p in PERCENTS] == pytest.approx(np.percentile(part, PERCENTS).tolist(), rel=1e-12)
        assert (found.mean(), found.deviation()) == pytest.approx((np.mean(part), np.std(part)), rel=1e-9)


def test_many_values_become_a_histogram_with_an_error_of_at_most_one_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    """From microseconds to hours, and zeros; the memory is that of the buckets, and none is lost at the change."""
    monkeypatch.setattr(samples, "EXACT_LIMIT", 1000)
    values = (np.random.default_rng(2).lognormal(-3, 3, 5500)).tolist() + [0.0] * 20
    found = filled(values)
    assert not found.exact
    assert found.count == len(values)
    expected = np.percentile(values, PERCENTS)
    for percent, value in zip(PERCENTS, expected, strict=True):
        assert found.percentile(percent) == pytest.approx(value, rel=0.01), percent
    assert found.mean() == pytest.approx(np.mean(values), rel=1e-9)
    assert found.deviation() == pytest.approx(np.std(values), rel=1e-6)
    assert len(found._values) <= 1000
    assert len(found._buckets) < 3000


def test_failed_requests_count_as_infinite() -> None:
    """Of 100 requests 2 failed: the 97th is the slowest answer's, and the 99th is infinite."""
    found = filled([float(value) for value in range(1, 99)])
    assert found.percentile(50, infinite=2) == pytest.approx(50.5)
    assert found.percentile(100 * 97 / 99, infinite=2) == pytest.approx(98)
    assert math.isinf(found.percentile(99, infinite=2))
    assert math.isinf(Samples().percentile(50, infinite=1))
