"""What a request needs of the engine before it is read."""

from __future__ import annotations

import pytest

from support.gates import open_gate
from triton_vllm.base.errors import DEAD, UnavailableError


def test_an_open_gate_lets_in():
    """Nothing is refused, and nothing is called."""
    gate = open_gate(in_flight=10_000, when_dead=pytest.fail)
    gate.require_alive()
    gate.require_awake()
    gate.require_room(3)


def test_a_dead_engine_refuses_and_is_reported():
    """Each time: the server may not have unloaded the model yet."""
    reported = []
    gate = open_gate(healthy=False, when_dead=lambda: reported.append("dead"))
    for _ in range(2):
        with pytest.raises(UnavailableError, match=DEAD):
            gate.require_alive()
    assert reported == ["dead", "dead"]


def test_a_model_asleep_refuses():
    """With the way to wake it up."""
    with pytest.raises(UnavailableError, match="asleep; an operator request wakes it up"):
        open_gate(asleep=True).require_awake()


@pytest.mark.parametrize(
    ("in_flight", "inputs", "text"),
    [
        (2, 1, None),
        (3, 1, "3 requests are in flight, and no more are taken"),
        (4, 1, "3 requests are in flight"),
        (1, 2, None),
        (2, 2, "with 2 inputs more than 3 requests would be in flight"),
    ],
)
def test_there_is_room_up_to_the_limit(in_flight, inputs, text):
    """Each input of a pooling request is one."""
    gate = open_gate(in_flight=in_flight, most=3)
    if text is None:
        gate.require_room(inputs)
        return
    with pytest.raises(UnavailableError, match=text):
        gate.require_room(inputs)
