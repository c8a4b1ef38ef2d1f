"""What vLLM's histogram has observed is observed again: as often, in the same buckets, with the same sum."""

from __future__ import annotations

import bisect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triton_vllm.histogram import HELD, MOST, Histogram, Replay

TOKENS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
SECONDS = (0.001, 0.005, 0.3, 1.5, 60.0)


class Source:
    """A histogram as Prometheus has it."""

    def __init__(self, bounds):
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, *values):
        for value in values:
            self.counts[bisect.bisect_left(self.bounds, value)] += 1
            self.total += value
        return Histogram("x", (), self.bounds, tuple(self.counts), self.total, "")


def same(source, published):
    again = Source(source.bounds)
    again.observe(*published)
    assert again.counts == source.counts


@given(st.lists(st.lists(st.integers(0, 200), max_size=8), min_size=1, max_size=5))
def test_whole_numbers_come_back_exactly(rounds):
    """Counts of tokens: bucket by bucket, and the sum to the last digit."""
    source, replay, published = Source(TOKENS), Replay(), []
    for values in rounds:
        published += replay.take(source.observe(*map(float, values)))
    same(source, published)
    assert sum(published) == source.total
    assert all(value.is_integer() for value in published)


@given(st.lists(st.lists(st.floats(0, 1000), max_size=8), min_size=1, max_size=5))
def test_times_come_back_in_their_buckets_with_their_sum(rounds):
    """Seconds: the sum as exact as sums of floats are."""
    source, replay, published = Source(SECONDS), Replay(), []
    for values in rounds:
        published += replay.take(source.observe(*values))
    same(source, published)
    assert sum(published) == pytest.approx(source.total, rel=1e-9, abs=1e-6)


def test_more_than_can_be_sent_at_once_comes_later():
    """Each call takes of each bucket its share, so that quantiles are right meanwhile; nothing is lost."""
    source, replay = Source(TOKENS), Replay()
    now = source.observe(*[1.0, 15.0] * MOST)
    first, second = replay.take(now), replay.take(now)
    assert sum(value > 10 for value in first) == MOST // 2 == len(first) // 2
    same(source, first + second)
    assert sum(first + second) == source.total
    assert replay.take(now) == []


def test_often_is_not_more():
    """However short the time between two calls, a second has no more round trips to the server."""
    source, replay = Source(TOKENS), Replay(0.05)
    now = source.observe(*[1.0, 15.0] * 10 * MOST)
    first, *later = [len(replay.take(now)) for _ in range(21)]
    assert first == MOST
    assert sum(later) <= MOST
    assert max(later) <= MOST // 10
    assert sum(later) > MOST // 2


def test_what_waits_is_bounded():
    """Under a load for which a minute would not be enough a share stands for all of it."""
    source, replay = Source(TOKENS), Replay()
    now = source.observe(*[1.0, 15.0] * HELD)
    published = [value for _ in range(2 * HELD // MOST) for value in replay.take(now)]
    assert len(published) == HELD
    assert sum(value > 10 for value in published) == HELD // 2
    assert sum(published) == pytest.approx(8 * HELD)


def test_a_restarted_engine_counts_on():
    """Its counts begin at zero again; what is published never falls and nothing is published twice."""
    replay = Replay()
    assert replay.take(Source(TOKENS).observe(4.0, 4.0)) == [4.0, 4.0]
    assert replay.take(Source(TOKENS).observe(3.0)) == [3.0]
