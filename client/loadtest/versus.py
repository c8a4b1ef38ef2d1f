"""Send the same requests to two servers in turns, in blocks, and compare the figures."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from loadtest import overhead
from loadtest.difference import difference
from loadtest.measures import Measures
from loadtest.options import MAX_CONCURRENCY
from loadtest.overhead import Overhead
from loadtest.shape import places_for, send_load

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from loadtest.endpoint import Backend
    from loadtest.record import Record, Request

# Each server gets so many blocks. Many short ones concern a machine in the same state more often
# than a few long ones. In replays of recorded blocks, 40 found 5 % of delay where 20 did not.
FEWEST_BLOCKS = 20
MOST_BLOCKS = 40
# At the ends of a block fewer requests are in flight. So a block has this many times the requests
# that are in flight, if there are enough for the fewest blocks.
_ROUNDS = 4
# What is compared. In a block, a median is steadier than a mean.
FIGURES = ("output_throughput", "median_ttft_ms", "median_tpot_ms", "median_e2el_ms")


@dataclass
class Comparison:
    """The blocks of two servers.

    Attributes:
        url: the second server's.
        backend: the second server's kind.
        model: the second server's.
        pairs: figures of neighbouring blocks, the first server's and the second one's.
        second: the second server's measures, over all blocks.
        first_seconds: seconds of the first server's blocks, also of one that was interrupted.
        overhead: the client's own part in all blocks.
    """

    url: str
    backend: str
    model: str = ""
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    second: Measures = field(default_factory=Measures)
    first_seconds: float = 0.0
    overhead: Overhead = field(default_factory=Overhead)

    def figures(self) -> dict[str, Any]:
        """Return what the report has. A figure is None if too few pairs of blocks have it."""
        found: dict[str, Any] = {
            "url": self.url,
            "backend": self.backend,
            "model_id": self.model,
            "blocks": len(self.pairs),
            "completed": self.second.answered,
            "failed": self.second.failed,
            "failures": dict(self.second.failures),
            "uncounted": self.second.uncounted,
        }
        for name in FIGURES:
            pairs = [(first[name], second[name]) for first, second in self.pairs]
            known = [pair for pair in pairs if None not in pair]
            differs = difference(known)
            found[name] = None
            if differs is not None:
                found[name] = {
                    "difference": differs.estimate,
                    "low": differs.low,
                    "high": differs.high,
                    "pairs": differs.pairs,
                    "blocks": pairs,
                }
        return found


def block_sizes(count: int, in_flight: int) -> list[int]:
    """Return the number of requests in each block of a server.

    Args:
        count: number of requests for the server.
        in_flight: the most requests in flight.
    """
    # With few requests, a block has at least one.
    blocks = min(max(count // (_ROUNDS * in_flight), FEWEST_BLOCKS), MOST_BLOCKS, count)
    size = count // blocks
    left_over = count % blocks
    return [size + 1 if number < left_over else size for number in range(blocks)]


async def send_in_turns(
    clients: Sequence[Backend],
    requests: Iterator[Request],
    options: argparse.Namespace,
    done: tuple[Callable[[Record], None], Callable[[Record], None]],
    *,
    count: int,
    comparison: Comparison,
) -> None:
    """Cut the requests into blocks, and send each block to both servers, one after the other.

    Which server comes first is drawn by lot for each block.

    Args:
        clients: the first server's and the second one's.
        requests: the requests.
        options: the command line.
        done: get each record of the first server, and of the second one.
        count: number of requests for each server.
        comparison: gets the figures.
    """
    in_flight = places_for(options.max_concurrency or MAX_CONCURRENCY, count)
    orders = _orders(options.seed)
    for number, size in enumerate(block_sizes(count, in_flight)):
        block = list(itertools.islice(requests, size))
        found: dict[int, dict[str, Any]] = {}  # the block's figures, by server
        for which in next(orders):
            measures = Measures()
            total = done[which]

            # The defaults hold the values of this turn of the loop.
            def note(
                record: Record,
                measures: Measures = measures,
                total: Callable[[Record], None] = total,
            ) -> None:
                measures.add(record)
                total(record)

            # Not timed: vLLM's server closes connections that were idle during the other's block.
            await clients[which].connect(min(in_flight, size))
            began = time.perf_counter()
            try:
                async with overhead.watch(comparison.overhead):
                    took = await send_load(
                        clients[which], iter(block), options, note, count=size, block=number
                    )
            finally:
                if which == 0:
                    comparison.first_seconds += time.perf_counter() - began
            found[which] = measures.figures(took)
        comparison.pairs.append((found[0], found[1]))


def _orders(seed: int) -> Iterator[tuple[int, int]]:
    """Yield for each block in which order the servers get it: (0, 1) or (1, 0).

    It is drawn by lot, as the interval needs it: the difference of two equal servers then has
    either sign by chance, whatever the machine does. If the order only alternated, the last block
    of a pair and the first one of the next would be of the same server. What slows down both of
    them would make two pairs differ in the same direction. In 195 runs of one server against
    itself, 90 to 93 % of the intervals contained zero with orders that alternated, and 92 to 97 %
    with orders by lot.
    """
    source = random.Random(seed)  # noqa: S311 - nobody must guess it
    while True:
        yield (0, 1) if source.random() < 0.5 else (1, 0)
