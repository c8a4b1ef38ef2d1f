"""Send responses outside the event loop, and merge the outputs that a request has queued."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from triton_vllm.base import supervised
from triton_vllm.base.protocols import Log
from triton_vllm.engine.job import Item
from triton_vllm.reply.endings import Endings
from triton_vllm.reply.reply import Reply
from triton_vllm.reply.stuck import Worker

Deliver = Callable[[Reply, list[Item]], None]

# The server needs two writes to find out that a client has closed an HTTP connection, so noticing
# that takes two pauses. That is a reason for shorter pauses with few streams.
MANY = 48
"""With this many streams per sender thread, a pause may be as long as ``Pacing.longest``.

With half as many or fewer it is at most half as long.
"""


@dataclass(frozen=True)
class Pacing:
    """How long a response of a stream waits, so that it can carry more tokens.

    Attributes:
        share: the part of a sender thread's time that sending may take before outputs are merged.
            If sends are so expensive that the pause would exceed ``longest``, they take more.
        longest: the longest pause between two responses of a request, s.
        merges: whether a response may contain several outputs at all.
    """

    share: float
    longest: float
    merges: bool = True


# A send costs the stub and the server 60 to 70 us each, whatever it carries. With 32 streams and
# one token per send, this took 1.5 of 2 cores away from the engine. A send is timed by the clock on
# purpose. It takes longer when the engine needs the cores, and then fewer sends are right. To a
# reader, twelve responses a second are smooth.
#
# Measured with vLLM 0.32 in four rounds, next to vLLM's own server, for 8, 32 and 128 streams. With
# these pauses we had 1.05, 0.94 and 0.94 times the tokens a second of vLLM's server. With half of
# the time in sends it was 0.98, 0.87 and 0.89 times; without a pause 0.83, 0.79 and 0.73 times. The
# gaps of 8 streams were 24, 12 and 6 ms, and 3 ms with vLLM's server.
FEW_CORES = Pacing(share=0.25, longest=0.08)
"""For machines where sends and the engine share the cores."""
# On an H200 with 16 cores, pauses did not raise the tokens a second of a Llama-7B. With 256 streams
# the gap at the 99th percentile was 48 to 60 ms with pauses and 37 to 39 ms without
# (benchmarks/results/gaps_h200.md). With vLLM 0.33 and half a host, these 256 streams fill the
# interpreter's core, at 62 ms.
CORES_TO_SPARE = Pacing(share=1.0, longest=0.0)
"""No pause: a response carries the outputs that were queued while its thread sent others."""
ONE_BY_ONE = Pacing(share=1.0, longest=0.0, merges=False)
"""One output per response, as the official backend sends them."""
_LEARNING = 0.05
"""The weight of the newest send in the average cost."""
_FIRST_COST_S = 1e-4
_AWAKE = -math.inf
"""In place of the time at which a thread wakes up: it needs no ring."""


class Outbox:
    """Sender threads, each with its own replies.

    A reply's first and last outputs are sent at once. In between, the next response waits for a
    pause. The pause grows with the number of streams and with the time that a send takes. At light
    load it is almost zero, and each output is a response of its own. Under pressure a response
    carries several tokens.

    Args:
        deliver: sends one response for a reply's consecutive outputs. Called in the reply's thread.
        log: logs an exception that ended a thread's work. The work then continues.
        threads: the number of threads that send.
        pacing: how long responses wait.
        clock: returns seconds.
    """

    def __init__(
        self,
        deliver: Deliver,
        log: Log,
        threads: int = 1,
        pacing: Pacing = FEW_CORES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        send = deliver if pacing.merges else partial(_one_by_one, deliver)
        # A vector for each token takes seconds to write. Such answers have the last thread to
        # themselves, so that streams need not wait for them.
        names = [*(f"triton-send-{i}" for i in range(threads)), "triton-send-bulky"]
        self._lanes = [_Lane(send, log, pacing, clock, name) for name in names]
        self._bulky_lane = threads
        # As many as lanes: a flag that the server never takes stops only its thread.
        self._endings = [Endings(log, f"triton-end-{i}") for i in range(threads)]
        self._next_endings = itertools.cycle(self._endings)
        self._next_lanes = itertools.cycle(range(threads))

    def start(self) -> None:
        """Start the threads."""
        for endings in self._endings:
            endings.start()
        for lane in self._lanes:
            lane.thread.start()

    def lane(self, *, bulky: bool = False) -> Callable[[Reply], None]:
        """Return what takes a new reply for its thread, each time that it has something to send.

        A reply stays with its thread, so its responses cannot overtake each other.
        """
        return self._lanes[self._bulky_lane if bulky else next(self._next_lanes)].put

    def later(self) -> Callable[[Callable[[], None], float], None]:
        """Return what calls a function in so many seconds, for the end of one request."""
        return next(self._next_endings).put

    def workers(self) -> list[Worker]:
        """Return the threads that call the server."""
        return [*self._lanes, *self._endings]

    def close(self) -> None:
        """Send the queued outputs, then end the threads."""
        for lane in self._lanes:
            lane.end()
        for lane in self._lanes:
            lane.thread.join()
        # Last, because the lanes put the ends of requests there.
        for endings in self._endings:
            endings.close()


def _one_by_one(deliver: Deliver, reply: Reply, items: list[Item]) -> None:
    for item in items:
        deliver(reply, [item])


class _ReplacedError(Exception):
    """Another thread has this one's work."""


class _Lane:
    """One sender thread, with the replies that have something to send or wait for their turn.

    Attributes:
        thread: sends now. Another one may take its place.
    """

    def __init__(
        self, deliver: Deliver, log: Log, pacing: Pacing, clock: Callable[[], float], name: str
    ) -> None:
        self._deliver = deliver
        self._pacing = pacing
        self._clock = clock
        # Replies with something to send, which this thread has not seen yet.
        self._ready: deque[Reply] = deque()
        # A heap of the replies that wait for their turns, each with its time and a number.
        self._waiting: list[tuple[float, int, Reply]] = []
        # Numbers order replies that are due at the same time; replies cannot be compared.
        self._numbers = itertools.count()
        # The thread sleeps in acquiring this lock. ``_ring`` releases it. No `queue.SimpleQueue`:
        # until Python 3.12, its `get` may wait for ever if the timeout is a few microseconds.
        self._bell = threading.Lock()
        self._bell.acquire()
        # When the thread wakes up by itself, by the clock.
        self._wakes_at = _AWAKE
        self._ended = False
        # Replies that have sent their first response and not their last.
        self._streams = 0
        # The average time of a send, s.
        self._cost = _FIRST_COST_S
        # The reply that is being sent. The lock makes this thread and the one that replaces it
        # agree on who has the rest.
        self._reply: Reply | None = None
        self._handing_over = threading.Lock()
        self._log = log
        self.thread = supervised.thread(name, self._run, log)

    def put(self, reply: Reply) -> None:
        """Take a reply; wake the thread only if it would sleep past the reply's turn."""
        self._ready.append(reply)
        if reply.complete or reply.due < self._wakes_at:
            self._ring()

    def end(self) -> None:
        """Make the thread send the queued outputs and end."""
        self._ended = True
        self._ring()

    def turn(self) -> float:
        """Send all replies that are due; return the time when the next one is due, or infinity."""
        self._take_ready()
        self._send_due()
        return self._waiting[0][0] if self._waiting else math.inf

    def _ring(self) -> None:
        """Wake the thread if it sleeps."""
        if self._wakes_at != _AWAKE:
            self._wakes_at = _AWAKE
            # It may have been rung a moment ago, while the thread was about to wake up by itself.
            with contextlib.suppress(RuntimeError):
                self._bell.release()

    @property
    def call(self) -> object | None:
        """See ``stuck.Worker``."""
        reply = self._reply
        return None if reply is None else reply.call

    def replace(self, call: object) -> bool:
        """See ``stuck.Worker``: let another thread send the rest, unless ``call`` has returned."""
        with self._handing_over:
            reply = self._reply
            if reply is None or not reply.abandon(call):
                return False
            self._reply = None
        self.thread = supervised.thread(self.thread.name, self._run, self._log)
        self.thread.start()
        return True

    def _run(self) -> None:
        with contextlib.suppress(_ReplacedError):
            self._work()

    def _work(self) -> None:
        """Send what is due and sleep until the next reply, until ``end`` is called; send the rest.

        Raises:
            _ReplacedError: another thread has this one's work.
        """
        self._wakes_at = _AWAKE
        while not self._ended:
            self._wakes_at = self.turn()
            # A reply that came while the thread counted as awake has not rung, so it is looked for
            # again before the sleep.
            if not self._ready and not self._ended:
                self._sleep(self._wakes_at)
            self._wakes_at = _AWAKE
        self._take_ready()
        # The model is being unloaded, so no reply waits for the end of its pause.
        while self._waiting:
            _, _, reply = heapq.heappop(self._waiting)
            self._send(reply, self._clock())

    def _sleep(self, until: float) -> None:
        timeout = -1 if until == math.inf else max(0.0, until - self._clock())
        self._bell.acquire(timeout=timeout)

    def _take_ready(self) -> None:
        """Send the ready replies that are due, and let the others wait for their turns."""
        while self._ready:
            reply = self._ready.popleft()
            now = self._clock()
            if reply.complete or now >= reply.due:
                self._send(reply, now)
            else:
                heapq.heappush(self._waiting, (reply.due, next(self._numbers), reply))

    def _send_due(self) -> None:
        """Send the waiting replies that are due now or in a moment."""
        # Replies that are due within a quarter of the pause are sent now: one wake-up then serves
        # many replies.
        horizon = self._clock() + 0.25 * self._pause()
        while self._waiting and self._waiting[0][0] <= horizon:
            _, _, reply = heapq.heappop(self._waiting)
            self._send(reply, self._clock())
            # A first or last output that has come meanwhile must not wait for the others.
            self._take_ready()

    def _pause(self) -> float:
        """Return the pause between two responses of a stream, s.

        In it, all streams together may take ``Pacing.share`` of the thread's time.
        """
        # A single reader gets each token on its own, as from the official backend.
        if self._streams <= 1:
            return 0.0
        longest = self._pacing.longest * min(max(self._streams / MANY, 0.5), 1.0)
        return min(longest, self._streams * self._cost / self._pacing.share)

    def _send(self, reply: Reply, now: float) -> None:
        """Send all that a reply has queued; set the time before which its next response waits.

        Raises:
            _ReplacedError: the call took so long that another thread has this one's work.
        """
        # Reset before draining. An output that arrives meanwhile queues the reply again, at worst
        # in vain.
        reply.queued = False
        items = []
        while reply.pending:
            items.append(reply.pending.popleft())
        if not items or reply.closed:
            return
        # ``due`` is set below, after the first response.
        is_first = reply.due == 0.0
        began = self._clock()
        self._reply = reply
        try:
            self._deliver(reply, items)
        except BaseException:
            # The thread goes on with the other replies, and nothing else would answer this one.
            reply.give_up()
            raise
        finally:
            self._require_work(reply)
        # A moving average: one slow send must not make all streams wait.
        self._cost += _LEARNING * (self._clock() - began - self._cost)
        # Only replies with more to come count as streams.
        if reply.closed:
            if not is_first:
                self._streams -= 1
            return
        if is_first:
            self._streams += 1
        reply.due = now + self._pause()

    def _require_work(self, reply: Reply) -> None:
        """Note that a reply has been sent; raise _ReplacedError if another thread has the rest."""
        with self._handing_over:
            if self._reply is reply:
                self._reply = None
                return
        raise _ReplacedError
