"""Work on all cores, piece by piece. This module needs only the standard library."""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

# Each has one piece in memory and two on their way. With more, the disk is the limit.
_MAX_WORKERS = 16

_Piece = TypeVar("_Piece")
_Result = TypeVar("_Result")


def on_all_cores(
    work: Callable[[_Piece], _Result], pieces: Iterable[_Piece]
) -> Generator[_Result, None, None]:
    """Do ``work`` with each piece in a thread, and yield the results in the order of the pieces.

    At most three pieces for each thread are in memory.
    """
    workers = worker_count()
    pending: deque[Future[_Result]] = deque()
    # Threads: reading, the compressors and SHA-256 release the interpreter's lock. Between
    # processes, all data would be copied.
    with ThreadPoolExecutor(workers) as pool:
        try:
            for piece in pieces:
                pending.append(pool.submit(work, piece))
                if len(pending) >= 3 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BaseException:
            # A piece has failed, or the caller has stopped. Nobody needs the waiting pieces.
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def worker_count() -> int:
    """Return how many threads work."""
    return min(_MAX_WORKERS, len(os.sched_getaffinity(0)))
