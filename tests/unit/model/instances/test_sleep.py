"""All instances see whether the engine sleeps, and one of them at a time may change that."""

from __future__ import annotations

import pytest

from support.instances import mappings
from triton_vllm.instances.sleep import SleepState


@pytest.fixture
def three(tmp_path) -> list[SleepState]:
    """Three instances, each with its own mapping of one file."""
    memories = mappings(tmp_path / "file", SleepState.size(3), 3)
    return [SleepState(memory, index, 3, tmp_path / "operator") for index, memory in enumerate(memories)]


def test_all_know_of_the_sleep_that_one_has_begun(three):
    """And who was the last to change it, at first the one that has started the engine."""
    assert [one.is_latest for one in three] == [True, False, False]
    three[2].note_change(asleep=True)
    assert [(one.asleep, one.closed, one.is_latest) for one in three] == [(True, True, False)] * 2 + [(True, True, True)]
    three[1].note_change(asleep=False)
    assert [(one.asleep, one.closed) for one in three] == [(False, False)] * 3
    assert [one.is_latest for one in three] == [False, True, False]


def test_all_know_of_a_sleep_that_waits(three):
    """The engine does not sleep yet. One of two that end does not end the other."""
    with three[0].waiting():
        with pytest.raises(ValueError, match="failed"), three[1].waiting():
            raise ValueError("failed")
        assert [(one.asleep, one.closed) for one in three] == [(True, False)] * 3
    assert [one.asleep for one in three] == [False] * 3


def test_the_sleep_of_an_instance_that_has_ended_waits_no_more(three):
    """Its wake_up requests have been counted nevertheless."""
    three[0].note_wake()
    three[2].note_wake()
    with three[1].waiting(), three[2].waiting():
        three[0].forget(2)
        assert three[0].asleep
        three[0].forget(1)
        assert not three[0].asleep
    assert [one.wakes() for one in three] == [2, 2, 2]


def test_one_has_the_turn(three):
    """Another one gets it when the first is done."""
    turn = three[0].take_turn()
    with pytest.raises(BlockingIOError):
        three[1].take_turn()
    three[0].end_turn(turn)
    three[1].end_turn(three[1].take_turn())
