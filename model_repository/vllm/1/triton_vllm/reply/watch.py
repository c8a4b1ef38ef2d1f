"""Find cancelled requests, with one thread for all requests."""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING

from triton_vllm.base import supervised

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from triton_vllm.base.protocols import Log
    from triton_vllm.engine.job import Job
    from triton_vllm.reply.reply import Reply

PERIOD_S = 0.05
"""From one look to the next, s, with few requests in flight."""
LONGEST_S = 1.0
"""The longest pause, s."""
# A server with HTTP clients is known to stop when its endpoint has refused two questions in a row
# (``startup.endpoint``). On two cores, with 300 HTTP streams and a grace of 5 s, its stubs were
# gone 7.2 to 9.1 s after SIGTERM (15 stops of tests/e2e/test_model_stops.py). With a pause of 1 s,
# one of two stops took 10.1 s.
ENDING_S = 0.5
"""From one question whether the server is stopping to the next, s.

With many requests in flight it is up to ``LONGEST_S``.
"""
PREPARE_S = 0.25
"""The pause while the question whether the server is stopping is prepared, s."""
# A quarter was too much. With 256 requests in flight on an H200, the questions were then two thirds
# of the stub's cost of a whole answer, without the engine's own work.
MAX_SHARE = 0.05
"""The share of the thread's time that may go into questions."""
QUESTION_S = 6e-5
"""The cost of a question, s, if nothing else runs."""
# On a busy machine a question takes longer. The rest is waiting, which takes no processor time.
DEAREST_S = 8 * QUESTION_S
"""The highest cost of a question that the watch assumes, s."""
# With few requests in flight, a cancellation is then noticed soon. At a question's usual cost, this
# takes 1 % of a core. With 24, and 32 requests in flight on two cores, there were two questions for
# each whole answer.
FEW = 8
"""The watch asks about this many requests in each period, whatever that costs."""
# A machine on which a look takes longer than a period has other work as well.
LEAST_S = 0.01
"""The shortest pause, s."""
# Without it, one late answer on a busy machine made the watch pause for a second, and one in twenty
# cancellations waited for that.
_GROWTH = 1.25
"""The largest factor by which the assumed cost may grow from one look to the next."""


class Departure:
    """Notices that the server is stopping while requests are in flight.

    A stopping server unloads a model only after the last response of every request. It waits for
    that for a limited time (30 s by default). Then it ends and cuts off the clients. It does not
    tell a model that it is stopping, but says so when asked.

    Args:
        is_ending: asks the server. A round trip.
        leave: called once, when the server is stopping.
        clock: returns seconds.
        prepare: called while no request is in flight, until it returns True.
    """

    def __init__(
        self,
        is_ending: Callable[[], bool],
        leave: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        prepare: Callable[[], bool] = lambda: True,
    ) -> None:
        self._is_ending = is_ending
        self._leave = leave
        self._clock = clock
        self._prepare = prepare
        self._is_prepared = False
        # When to ask the server again, by the clock. Infinity once it has said yes.
        self._next = 0.0

    def prepare(self) -> float | None:
        """Prepare the question. Return the pause before the next call in s; None if it is ready."""
        if not self._is_prepared:
            self._is_prepared = self._prepare()
        return None if self._is_prepared else PREPARE_S

    def look(self) -> None:
        """Ask the server, if ``ENDING_S`` have passed since the last question."""
        if self._clock() < self._next:
            return
        self._next = self._clock() + ENDING_S
        if self._is_ending():
            self._next = math.inf
            self._leave()


class CancellationWatch:
    """Asks the server about each request in flight every 50 ms.

    Triton does not tell a model about a cancellation. The model must ask, with a round trip for
    each request. Asking here, not once per token, keeps the cost off the token path. With more than
    about 50 requests in flight the period grows, to 0.3 s at 256, so that asking stays cheap.

    Args:
        jobs: returns the jobs in flight. Called in the watch's thread.
        cancel: called for a job that the client cancelled, or whose client can no longer receive
            anything.
        log: logs failed questions, and an exception that ended the thread's work. The work then
            continues.
        departure: asked while requests are in flight.
        clock: returns seconds. The watch measures the cost of asking with it.
    """

    def __init__(
        self,
        jobs: Callable[[], Iterable[Job[Reply]]],
        cancel: Callable[[Job[Reply]], None],
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
        # What a question is assumed to cost, s.
        self._cost = QUESTION_S
        # Set while a request may be in flight.
        self._wake = threading.Event()
        self._end = threading.Event()
        self._thread = supervised.thread("triton-cancel", self._run, log)

    def start(self) -> None:
        """Start the thread; it sleeps until a request is in flight."""
        self._thread.start()

    def wake(self) -> None:
        """Wake the thread, because a request is in flight; while idle, it sleeps until then."""
        if not self._wake.is_set():
            self._wake.set()

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        self._wake.set()
        self._thread.join()

    def look(self) -> tuple[bool, float]:
        """Ask about each job once.

        Returns:
            Whether any of the jobs is still open, and the pause before the next look in seconds.
        """
        # 1) Ask about each job.
        began = self._clock()
        asked = 0
        for job in self._jobs():
            reply = job.delivery
            try:
                # If a reply is closed while its job runs, a response could not be sent, and vLLM
                # works for nothing.
                if reply.closed or (not reply.cancelled and reply.is_cancelled()):
                    self._cancel(job)
            except Exception as error:  # noqa: BLE001 - the remaining jobs must be asked about
                self._note(error)
            if not reply.closed:
                asked += 1
        # 2) Assume what a question costs by this look, within limits.
        spent = self._clock() - began
        self._cost = min(max(spent / max(asked, 1), QUESTION_S), _GROWTH * self._cost, DEAREST_S)
        # 3) Ask whether the server is stopping.
        if asked and self._departure is not None:
            self._departure.look()
        # 4) Decide on the pause. This is what is left of the period:
        rest = began + PERIOD_S - self._clock()
        # After this pause, the questions beyond the first few have taken ``MAX_SHARE`` of the time.
        fair = self._cost * (asked - FEW) * (1 / MAX_SHARE - 1)
        return asked > 0, min(max(rest, LEAST_S, fair), LONGEST_S)

    def _note(self, error: Exception) -> None:
        # Once is enough: the same question would fail twenty times a second.
        if not self._failed:
            self._failed = True
            self._log.error(f"a request could not be asked about: {type(error).__name__}: {error}")

    def _rest(self) -> None:
        """Sleep until a request is in flight."""
        while not self._wake.is_set():
            pause = None if self._departure is None else self._departure.prepare()
            self._wake.wait(pause)

    def _run(self) -> None:
        """Look again and again while requests are in flight; sleep in between."""
        while not self._end.is_set():
            self._rest()
            # Cleared before the look: a request that comes meanwhile sets it again.
            self._wake.clear()
            try:
                busy, pause = self.look()
            except BaseException:
                # The thread begins again, and the requests in flight still need it.
                self._wake.set()
                raise
            self._end.wait(pause)
            if busy:
                self._wake.set()
