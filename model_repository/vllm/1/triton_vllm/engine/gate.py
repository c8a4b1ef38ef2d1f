"""Let requests in before they are read, by the engine's state; both APIs ask here first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triton_vllm.base.errors import UnavailableError

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

    def let_in(self, *, to_operator: bool = False) -> None:
        """Refuse a request by the engine's state, before it is read.

        Args:
            to_operator: whether it is an operator request. It must reach a full model, to drain
                it, and a sleeping one, to wake it up.

        Raises:
            UnavailableError: the engine is dead, asleep or has been shut down, or too many
                requests are in flight.
        """
        # No check of this class asks vLLM's processes: every request passes here.
        if not self._jobs.is_up():
            if self._when_dead is not None:
                self._when_dead()
            raise UnavailableError(self._jobs.why_down)
        if not to_operator:
            self._operator.require_awake()
            self.require_room()

    def require_room(self, count: int = 1, unit: str = "inputs") -> None:
        """Refuse the request if too many would be in flight.

        Args:
            count: the inputs of a pooling request or the completions of another one; each counts.
            unit: the word for them in the error.

        Raises:
            UnavailableError: there is no room now.
        """
        # 0 means no limit.
        is_full = 0 < self._most < self._jobs.ledger.count_of_all() + count
        if not is_full:
            return
        if count == 1:
            raise UnavailableError(
                f"{self._most} requests are in flight, and no more are taken: try again later"
            )
        raise UnavailableError(
            f"with {count} {unit} more than {self._most} requests would be in flight: "
            "try again later"
        )
