"""Notice a call to the server that does not return, and let another thread go on with the rest."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from triton_vllm.base import supervised

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from triton_vllm.base.protocols import Log

PERIOD_S = 5.0
"""From one look at the threads to the next, s."""
# Looks are counted, not seconds: if the machine or this process stands still, a call takes as many
# seconds, but no look comes in between.
LOOKS = 4
"""A call that this many looks in a row find after the first one does not return: 20 to 25 s."""


class Worker(Protocol):
    """A thread that calls the server."""

    @property
    def call(self) -> object | None:
        """A new object for each call, while it lasts; None between two calls."""

    def replace(self, call: object) -> bool:
        """Go on in another thread, unless this call has returned; return whether it has not.

        If it returns later, its thread ends.
        """


class StuckWatch:
    """Looks at threads that call the server.

    Triton's gRPC front end can deadlock when a client is killed (24.10). A response of that client
    then never returns from ``ResponseSender::Send``. Other requests have their own thread in the
    server, so another thread can send their responses.

    Args:
        workers: the threads.
        tell: called in this object's thread once, when the first call does not return.
        log: logs an exception that ended the thread's work. The work then continues.
        is_stopped: returns whether the server stands still, e.g. in a debugger. No call can return
            then, and the looks count from the beginning.
        period_s: from one look to the next.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        tell: Callable[[], object],
        log: Log,
        is_stopped: Callable[[], bool] = lambda: False,
        period_s: float = PERIOD_S,
    ) -> None:
        self._workers = workers
        self._tell = tell
        self._is_stopped = is_stopped
        self._period_s = period_s
        # Whether ``tell`` has been called.
        self._told = False
        # For each worker's number, the call of the last look and how many looks found it again.
        self._seen: dict[int, tuple[object, int]] = {}
        self._end = threading.Event()
        self._thread = supervised.thread("triton-send-watch", self._run, log)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        self._thread.join()

    def look(self) -> None:
        """Replace each thread whose call does not return."""
        if self._is_stopped():
            self._seen.clear()
            return
        for number, worker in enumerate(self._workers):
            call = worker.call
            # How many looks in a row have found this call again.
            before, looks = self._seen.get(number, (None, 0))
            is_same = call is not None and call is before
            looks = looks + 1 if is_same else 0
            self._seen[number] = (call, looks)
            # After a first call that did not return, other requests should not wait as long again.
            enough = 1 if self._told else LOOKS
            if looks >= enough and worker.replace(call) and not self._told:
                self._told = True
                self._tell()

    def _run(self) -> None:
        while not self._end.wait(self._period_s):
            self.look()
