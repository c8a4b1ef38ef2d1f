"""loadtest.shape: how many requests may be in flight."""

from __future__ import annotations

import pytest

from loadtest.shape import places_for


@pytest.mark.parametrize(("limit", "count", "places"), [(1000, None, 1000), (8, 100, 8), (1000, 100, 100), (None, 100, 100)])
def test_the_limit_is_that_of_the_user(limit: int | None, count: int | None, places: int) -> None:
    """Whatever the default is; there are no more places than requests."""
    assert places_for(limit, count) == places
