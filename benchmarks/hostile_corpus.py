"""How long each input of the hostile corpus takes to be answered, and how much later its neighbour is.

    python benchmarks/hostile_corpus.py URL PID

URL is HOST:PORT of the gRPC frontend of a server with the stand-in of the tests, PID the server's.
"""

from __future__ import annotations

import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from hostile.corpus import CORPUS  # noqa: E402
from support.model_requests import prompt  # noqa: E402
from support.triton_client import stream  # noqa: E402

NEIGHBOUR = prompt("The capital of France is", {"temperature": 0, "max_tokens": 64}, exclude_input_in_output=True)
ANSWER_SECONDS = 1.0
LATER_SECONDS = 0.25
USUAL_ROUNDS = 50
REPLY_SECONDS = 120.0


def seconds(url: str, request: Any) -> float:
    """Return the seconds from sending a request, on a connection of its own, to its last response."""
    began = time.monotonic()
    stream(url, [request], timeout=REPLY_SECONDS)
    return time.monotonic() - began


def memory(pid: int) -> dict[int, float]:
    """Return the resident megabytes of the server's children by pid."""
    return {p.pid: p.memory_info().rss / 1e6 for p in psutil.Process(pid).children(recursive=True)}


def main(url: str, pid: str) -> None:
    """Measure and print."""
    usual = statistics.median(seconds(url, NEIGHBOUR) for _ in range(USUAL_ROUNDS))
    before, rows = memory(int(pid)), []
    with ThreadPoolExecutor(2) as pool:
        for case in CORPUS:
            request = case.make()
            hostile, neighbour = pool.submit(seconds, url, request), pool.submit(seconds, url, NEIGHBOUR)
            rows.append((case.name, hostile.result(), neighbour.result() - usual))
    grown = [round(size - before[child]) for child, size in memory(int(pid)).items() if child in before]
    print(f"{len(rows)} inputs; a neighbour alone takes {usual:.3f} s; MB more in each process: {grown}")
    print(f"answer: median {statistics.median(r[1] for r in rows):.3f} s, longest {max(r[1] for r in rows):.3f} s")
    print(f"neighbour later by: median {statistics.median(r[2] for r in rows):.3f} s, most {max(r[2] for r in rows):.3f} s")
    for name, answer, later in rows:
        if answer > ANSWER_SECONDS or later > LATER_SECONDS:
            print(f"exceeds: {name}: answered after {answer:.2f} s, neighbour {later:.2f} s later")


if __name__ == "__main__":
    main(*sys.argv[1:])
