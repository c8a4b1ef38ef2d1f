"""A Triton that is not here: which releases serve a model that has no stub of its own."""

from __future__ import annotations

import pytest

from vllm_env.triton.elsewhere import ServerRecord, servers_of
from vllm_env.triton.root import NEWEST_KNOWN


@pytest.mark.parametrize(
    ("release", "since", "before"),
    [
        ("24.11", "24.11", "25.08"),
        ("25.07", "24.11", "25.08"),
        ("25.10", "25.08", "26.06"),
        ("26.07", "26.06", ""),
        ("27.02", "26.06", ""),
    ],
)
def test_a_release_stands_for_those_with_its_rules(release: str, since: str, before: str) -> None:
    """From the first with its rules to the next change, if one is known."""
    assert servers_of(release) == ServerRecord(since, before, NEWEST_KNOWN)
