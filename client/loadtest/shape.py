"""Send requests in the shape of load that the command line asks for."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import time
from typing import TYPE_CHECKING, Any

from loadtest import loops
from loadtest.arrivals import arrival_times
from loadtest.options import MAX_CONCURRENCY

if TYPE_CHECKING:
    import argparse
    from array import array
    from collections.abc import Callable, Coroutine, Iterator

    from loadtest.loops import Client
    from loadtest.record import Record, Request


async def send_load(
    client: Client,
    requests: Iterator[Request],
    options: argparse.Namespace,
    done: Callable[[Record], None],
    *,
    count: int | None,
    block: int = 0,
) -> float:
    """Send the requests, and wait for all of them; return the seconds that this took.

    Args:
        client: sends them.
        requests: the requests.
        options: the command line.
        done: gets each record when it is complete.
        count: number of requests; None if only the duration limits it.
        block: number of the part of a run; each part has arrivals of its own.
    """
    # A closed loop. An open one always has a number of requests, from `options.request_count`.
    if options.request_rate == math.inf or count is None:
        places = places_for(options.max_concurrency or MAX_CONCURRENCY, count)
        singles = ((request,) for request in requests)
        started = time.perf_counter()
        until = started + options.duration if options.duration else math.inf
        await loops.closed_loop([client] * places, singles, done, until=until)
    else:
        # The due times come before the start: for many requests, they take a while.
        timed = zip(due_times(options, count, block), requests, strict=False)
        started = time.perf_counter()
        until = started + options.duration if options.duration else math.inf
        places = places_for(options.max_concurrency, count)
        await loops.open_loop([client] * places, timed, done, started=started, until=until)
    return time.perf_counter() - started


def due_times(options: argparse.Namespace, count: int, block: int = 0) -> array[float]:
    """Return when the requests of an open loop are due, in seconds from its start.

    Args:
        options: the command line.
        count: number of requests.
        block: number of the part of a run.
    """
    rate = options.request_rate
    if options.duration:
        # The number is rounded. The last request must not be due after the duration.
        rate = max(rate, count / options.duration)
    return arrival_times(
        count=count, rate=rate, seed=options.seed + block, burstiness=options.burstiness
    )


def places_for(limit: int | None, count: int | None) -> int:
    """Return how many requests may be in flight: not more than there are.

    Args:
        limit: the most; None sets no limit.
        count: number of requests; None if nobody knows it.
    """
    known = [number for number in (limit, count) if number is not None]
    return min(known, default=MAX_CONCURRENCY)


async def until_interrupt(work: Coroutine[Any, Any, None], stop: Callable[[], None]) -> bool:
    """Wait for ``work``; at the first Ctrl-C, cancel it. Return whether that has happened.

    Args:
        work: what to wait for.
        stop: called before ``work`` is cancelled.
    """
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    interrupted = False

    def interrupt() -> None:
        nonlocal interrupted
        interrupted = True
        # The second Ctrl-C ends the program without a report.
        loop.remove_signal_handler(signal.SIGINT)
        stop()
        task.cancel()

    # Windows has no such handlers. There, Ctrl-C ends the program without a report.
    with contextlib.suppress(NotImplementedError):
        loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        await task
    except asyncio.CancelledError:
        if not interrupted:
            raise
    finally:
        with contextlib.suppress(NotImplementedError):
            loop.remove_signal_handler(signal.SIGINT)
    return interrupted
