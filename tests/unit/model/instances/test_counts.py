"""Each instance sees how many requests the others have, each in its own process."""

from __future__ import annotations

import pytest

from support.instances import mappings
from triton_vllm.instances.counts import Counts


@pytest.fixture
def three(tmp_path) -> list[Counts]:
    """Three instances, each with its own mapping of one file."""
    return [Counts(memory, index, 3) for index, memory in enumerate(mappings(tmp_path / "file", Counts.size(3), 3))]


def test_an_instance_sees_the_requests_of_the_others(three):
    """Not its own, which it knows; those of one that has ended do not count."""
    first, second, third = three
    first.note(5)
    second.note(7)
    assert [one.others() for one in three] == [7, 5, 12]
    third.forget(1)
    assert [one.others() for one in three] == [0, 5, 5]
    assert not third.alone


def test_an_only_instance_has_no_others():
    """Its memory is its own."""
    one = Counts()
    one.note(3)
    assert (one.alone, one.others()) == (True, 0)
