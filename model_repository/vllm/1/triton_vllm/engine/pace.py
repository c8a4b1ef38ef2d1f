"""How often the engine is checked, and how long it may be silent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """How often the engine is checked, in seconds.

    Attributes:
        restart: whether a dead engine is started again.
        health_period: between two checks.
        question_period: between two questions to EngineCore.
        silence: EngineCore hangs if it does not answer for this time. A request is stuck if it has
            no output for this time. With 0, it is the time that vLLM itself waits for a worker's
            step.
        idle: EngineCore also hangs if for this time it does not answer, gives no output and does
            nothing. With 0, only ``silence`` counts.
        backoff: seconds before each attempt to start a dead engine again.
    """

    restart: bool = True
    health_period: float = 0.5
    question_period: float = 5.0
    silence: float = 0.0
    idle: float = 0.0
    backoff: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)
