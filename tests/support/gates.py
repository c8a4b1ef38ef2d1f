"""The real gate, in front of an engine of which a test says what state it is in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from triton_vllm.engine.gate import Gate


def open_gate(*, healthy=True, in_flight=0, asleep=False, most=0, when_dead=None):
    """Return a gate; by default it lets everything in."""
    runner: Any = SimpleNamespace(
        is_up=lambda: healthy,
        in_flight=SimpleNamespace(count=lambda: in_flight),
        operator=SimpleNamespace(asleep=asleep),
    )
    return Gate(runner, most, when_dead)
