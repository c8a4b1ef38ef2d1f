"""Admit requests or refuse them; every request passes here, by whichever way it came."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triton_vllm.base.errors import UnavailableError
from triton_vllm.operator.run import ASLEEP

if TYPE_CHECKING:
    from collections.abc import Callable

    from triton_vllm.base.limits import Limits
    from triton_vllm.engine.jobs import Jobs
    from triton_vllm.operator.run import Operator


class Gate:
    """Checks the engine's state for a request, before the request is read.

    Args:
        jobs: the requests in flight.
        operator: says whether the engine sleeps.
        limits: how many requests may be in flight.
        when_dead: called for each request that finds the engine dead.
    """

    def __init__(
        self,
        jobs: Jobs,
        operator: Operator,
        limits: Limits,
        when_dead: Callable[[], None] | None,
    ) -> None:
        self._jobs = jobs
        self._operator = operator
        self._most = limits.max_requests_in_flight
        self._when_dead = when_dead

    def require_alive(self) -> None:
        """Refuse the request if there is no engine.

        Raises:
            UnavailableError: the engine is dead, or has been shut down.
        """
        # No check of this class asks vLLM's processes: every request passes here.
        if self._jobs.is_up():
            return
        if self._when_dead is not None:
            self._when_dead()
        raise UnavailableError(self._jobs.why_down)

    def require_awake(self) -> None:
        """Refuse the request if only operator requests are taken.

        Raises:
            UnavailableError: the model is asleep.
        """
        # An operator request must still get through, to wake the model up.
        if self._operator.asleep:
            raise UnavailableError(ASLEEP)

    def require_room(self, count: int = 1, unit: str = "inputs") -> None:
        """Refuse the request if too many would be in flight.

        Args:
            count: the inputs of a pooling request or the completions of another one; each counts.
            unit: the word for them in the error.

        Raises:
            UnavailableError: there is no room now.
        """
        if not 0 < self._most < self._jobs.ledger.count_of_all() + count:
            return
        if count == 1:
            raise UnavailableError(
                f"{self._most} requests are in flight, and no more are taken: try again later"
            )
        raise UnavailableError(
            f"with {count} {unit} more than {self._most} requests would be in flight: "
            "try again later"
        )
