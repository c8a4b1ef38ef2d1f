"""Find cancelled requests, with one thread for all of them."""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING

from triton_vllm.base import supervised

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from triton_vllm.base.protocols import Log
    from triton_vllm.job import Job

PERIOD_S = 0.05
LONGEST_S = 1.0
"""Longest pause, s."""
MAX_SHARE = 0.05
"""Share of the thread's time that may go into asking: a question costs 60 us. At a quarter of the time, with 256 in flight
on an H200, asking was two thirds of what a whole answer cost the stub beyond the engine's own work."""
QUESTION_S = 6e-5
"""What a question costs where nothing else runs."""
DEAREST_S = 8 * QUESTION_S
"""What the watch takes a question to cost at most: on a busy machine the rest is waiting, which takes nothing from anybody."""
FEW = 24
"""Requests about which it asks at each period whatever that costs, so that none of a few waits for long: 3 % of a core where a
question takes its usual time."""
LEAST_S = 0.01
"""Shortest pause: a machine on which looks take longer than a period has other work as well, s."""
_GROWTH = 1.25
"""By which it may find a question dearer than in the look before. Taken as it comes, one late answer on a busy machine made it
pause for a second, and one in twenty cancellations waited for that."""


class Departure:
    """Notice that the server is about to end while requests are in flight.

    It unloads a model only after the last response of every request, waits for that a bounded time (30 s unless told
    otherwise), then ends and cuts the clients off. It tells no model that it is waiting, but says so when it is asked.

    Args:
        is_ending: asks the server; a round trip.
        leave: called once, when it ends.
        clock: seconds.
    """

    def __init__(
        self, is_ending: Callable[[], bool], leave: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._is_ending = is_ending
        self._leave = leave
        self._clock = clock
        self._next = 0.0

    def look(self) -> None:
        """Ask, if a second has passed since the last time."""
        if self._clock() < self._next:
            return
        self._next = self._clock() + LONGEST_S
        if self._is_ending():
            self._next = math.inf
            self._leave()


class CancellationWatch:
    """Ask the server about each request in flight every 50 ms.

    Triton does not tell a model about a cancellation: the model has to ask, one round trip per request. Asking here, not
    once per token, keeps that off the token path. With more than about 60 in flight the period grows, to 0.3 s at 256, so
    that asking stays cheap.

    Args:
        jobs: returns the jobs in flight; called in the watch's thread.
        cancel: called for a job that the client cancelled, and for one to which nothing can be sent any more.
        log: told of questions that failed, and of what ended the thread's work, which then goes on.
        departure: looked at while requests are in flight.
        clock: seconds; by it the watch knows what asking costs.
    """

    def __init__(
        self,
        jobs: Callable[[], Iterable[Job]],
        cancel: Callable[[Job], None],
        log: Log,
        departure: Departure | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._departure = departure
        self._jobs = jobs
        self._cancel = cancel
        self._log = log
        self._failed = False
        self._clock = clock
        self._cost = QUESTION_S
        self._wake = threading.Event()
        self._end = threading.Event()
        self._thread = supervised.thread("triton-cancel", self._run, log)

    def start(self) -> None:
        """Start the thread; it sleeps until there is a request in flight."""
        self._thread.start()

    def wake(self) -> None:
        """Say that there is a request in flight; idle, the thread sleeps until then."""
        if not self._wake.is_set():
            self._wake.set()

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        self._wake.set()
        self._thread.join()

    def look(self) -> tuple[bool, float]:
        """Ask about each job once; return whether any of them is open still, and the seconds to pause before the next look."""
        began = self._clock()
        asked = 0
        for job in self._jobs():
            reply = job.reply
            try:
                # closed though its job goes on: something could not be sent, and vLLM works for nobody
                if reply.closed or (not reply.cancelled and reply.is_cancelled()):
                    self._cancel(job)
            except Exception as error:  # noqa: BLE001 - the jobs after it must be asked about
                self._note(error)
            asked += not reply.closed
        spent = self._clock() - began
        self._cost = min(max(spent / max(asked, 1), QUESTION_S), _GROWTH * self._cost, DEAREST_S)
        if asked and self._departure is not None:
            self._departure.look()
        rest = began + PERIOD_S - self._clock()
        return asked > 0, min(max(rest, LEAST_S, self._cost * (asked - FEW) * (1 / MAX_SHARE - 1)), LONGEST_S)

    def _note(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            self._log.error(f"a request could not be asked about: {type(error).__name__}: {error}")

    def _run(self) -> None:
        while not self._end.is_set():
            self._wake.wait()
            # Cleared before looking: a request that comes meanwhile sets it again.
            self._wake.clear()
            try:
                busy, pause = self.look()
            except BaseException:
                self._wake.set()  # the thread begins again, and those in flight are still there
                raise
            self._end.wait(pause)
            if busy:
                self._wake.set()
