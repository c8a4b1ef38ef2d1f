"""Send a load to a target, in a closed loop or in an open one, with the same clients."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Protocol

from harness.metrics import summarize
from harness.workload import conversations
from loadtest import loops
from loadtest.arrivals import arrival_times
from loadtest.measures import Measures
from loadtest.record import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.metrics import Measurement
    from harness.workload import Load
    from loadtest.record import Record


class Client(loops.Client, Protocol):
    """A connection that answers one request at a time."""

    async def close(self) -> None:
        """Release the connection."""


class WrongAnswerError(Exception):
    """A target failed, or sent too few answers, or one with another number of tokens."""


async def run_load(clients: Sequence[loops.Client], load: Load) -> Measurement:
    """Send ``load`` to one target through ``clients``; return the figures.

    Args:
        clients: connections to the target. Each has one request at a time.
        load: the requests.

    Raises:
        WrongAnswerError: a request failed, an answer has another number of tokens than requested,
            or there are too few answers.
    """
    measures = Measures()

    def done(record: Record) -> None:
        """Check the record of a request that has ended, and count it."""
        if record.outcome is Outcome.FAILED:
            raise WrongAnswerError(record.reason)
        if record.outcome is Outcome.ANSWERED:
            _check(record)
            measures.add(record)

    # A full collection in the load generator would count as a pause of the target.
    gc.collect()
    gc.disable()
    started = time.perf_counter()
    unfinished = 0
    try:
        if load.rate:
            # All requests are due within this time (s).
            window = load.seconds or load.requests / load.rate
            # If `requests` limits their number, they are spread over the window at a lower rate.
            count = min(load.requests, max(1, round(load.rate * window)))
            times = arrival_times(count=count, rate=count / window, seed=load.seed)
            # An open loop has no multi-turn conversations, so each one is a single request.
            requests = (request for (request,) in conversations(load))
            # The window has ended, and the last answers have had as long again, and ten seconds.
            give_up = started + 2 * window + 10
            timed = zip(times, requests, strict=False)
            await loops.open_loop(clients, timed, done, started=started, give_up=give_up)
            unfinished = count - measures.answered
        else:
            until = started + load.seconds if load.seconds else float("inf")
            await loops.closed_loop(clients, conversations(load), done, until=until)
    finally:
        gc.enable()
    # In a window of time, as many requests are sent as fit into it: one must be answered. In an
    # open loop, some may be unfinished.
    wanted = 1 if load.seconds else load.requests
    if measures.answered < wanted:
        raise WrongAnswerError(
            f"{measures.answered} answers to {wanted} requests, {unfinished} unfinished"
        )
    return summarize(measures, measures.last_piece - started, unfinished)


def _check(record: Record) -> None:
    wanted = record.request.parameters["max_tokens"]
    if record.output_tokens != wanted:
        raise WrongAnswerError(f"an answer has {record.output_tokens} tokens instead of {wanted}")
