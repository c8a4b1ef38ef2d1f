"""Sends responses off the event loop, merging what has queued up for a request since its last send."""

from __future__ import annotations

import heapq
import itertools
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from triton_vllm.job import Job

Deliver = Callable[[Job, list[Any]], None]

SHARE = 0.25
"""Part of a sender thread's time that sending may take before outputs are merged. A send costs the stub and the server
60 to 70 us each whatever it carries; at 32 streams, one token a send took 1.5 of 2 cores away from the engine."""
LONGEST_S = 0.05
"""Longest pause between two responses of a request, s: smooth to a reader, and 12 tokens of a fast model."""
_LEARNING = 0.05
_FIRST_COST_S = 1e-4


class Outbox:
    """Sender threads, each with its lane of jobs.

    A job's first and last output go at once. In between it is sent again only after a pause that grows with the number
    of streams and with the time that a send takes: next to nothing at light load, where each output is a response of its
    own, and some tokens' time under pressure. A job always goes to the same thread, so its responses cannot overtake
    each other.
    """

    def __init__(self, deliver: Deliver, threads: int = 1) -> None:
        self._lanes = [_Lane(deliver, f"triton-send-{i}") for i in range(threads)]
        self._next = 0

    def assign(self, job: Job) -> None:
        """Choose the job's thread; call once, before the first `put`."""
        job.lane = self._next
        self._next = (self._next + 1) % len(self._lanes)

    def put(self, job: Job, item: Any) -> None:
        """Queue an output or an exception for sending; never blocks."""
        job.pending.append(item)
        # A job that waits for its turn is not queued again for every token, but its last output does not wait.
        if not job.queued or job.ended:
            job.queued = True
            self._lanes[job.lane].ready.put(job)

    def close(self) -> None:
        """Send what is queued, then end the threads."""
        for lane in self._lanes:
            lane.ready.put(None)
        for lane in self._lanes:
            lane.thread.join()


class _Lane:
    """One sender thread: jobs with something to send, and those whose pause is not over."""

    def __init__(self, deliver: Deliver, name: str) -> None:
        self._deliver = deliver
        self.ready: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._waiting: list[tuple[float, int, Job]] = []
        self._numbers = itertools.count()  # orders jobs that are due at the same time
        self._streams = 0
        self._cost = _FIRST_COST_S
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while True:
            try:
                job = self.ready.get(timeout=self._until_due())
            except queue.Empty:
                self._send_due()
                continue
            if job is None:
                break
            now = time.monotonic()
            if job.ended or now >= job.due:
                self._send(job, now)
            else:
                heapq.heappush(self._waiting, (job.due, next(self._numbers), job))
            del job  # or the last request lives on until the next one comes
            if self._waiting and self._waiting[0][0] <= now:
                self._send_due()
        while self._waiting:
            self._send(heapq.heappop(self._waiting)[2], time.monotonic())

    def _until_due(self) -> float | None:
        return max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else None

    def _send_due(self) -> None:
        # All that come due within a part of the pause go now: one wake-up for many.
        horizon = time.monotonic() + 0.25 * self._pause()
        while self._waiting and self._waiting[0][0] <= horizon:
            self._send(heapq.heappop(self._waiting)[2], time.monotonic())

    def _pause(self) -> float:
        if self._streams <= 1:  # a lone reader gets each token by itself, as from the official backend
            return 0.0
        return min(LONGEST_S, self._streams * self._cost / SHARE)

    def _send(self, job: Job, now: float) -> None:
        # Before draining: an output that arrives meanwhile queues the job again, at worst for nothing.
        job.queued = False
        items = []
        while job.pending:
            items.append(job.pending.popleft())
        if not items or job.closed:
            return
        is_first = job.due == 0.0
        self._deliver(job, items)
        # Wall time on purpose: it grows when the engine needs the cores, and then fewer sends are the right answer.
        self._cost += _LEARNING * (time.monotonic() - now - self._cost)
        if job.closed:
            self._streams -= not is_first
        else:
            self._streams += is_first
            job.due = now + self._pause()
