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
    """Yield the results of the pieces in their order. Few of them are in memory."""
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
            # Nobody needs the waiting pieces.
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def worker_count() -> int:
    """Return how many threads work."""
    return min(_MAX_WORKERS, len(os.sched_getaffinity(0)))
