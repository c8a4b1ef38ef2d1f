"""loadtest.shape: how many requests may be in flight, and when they are due."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from loadtest.options import parse, request_count
from loadtest.record import Record, Request
from loadtest.shape import due_times, send_load


@pytest.mark.parametrize("rate", ["0.26", "0.24", "0.01"])
def test_all_requests_are_due_within_the_duration(rate: str) -> None:
    """Also where their number is rounded up; equal gaps, of which one is left at the end."""
    options = parse(["--request-rate", rate, "--duration", "10", "--burstiness", "inf"])
    count = request_count(options, 5)
    assert count == max(1, round(float(rate) * 10))
    times = due_times(options, count)
    assert times[-1] + times[0] <= 10.0 + 1e-9


async def test_no_request_starts_after_the_duration() -> None:
    """In an open loop with one place, too: the first answer takes longer than that, and the other 49 are not sent."""
    asked: list[int] = []

    class Slow:
        async def ask(self, request: Request, record: Record) -> None:
            asked.append(request.index)
            await asyncio.sleep(0.1)
            record.add(("x",), 1)

    client: Any = Slow()
    options = parse(["--request-rate", "1000", "--duration", "0.05", "--max-concurrency", "1"])
    load = (Request(number, "", {}, stream=True) for number in range(50))
    await send_load(client, load, options, lambda _: None, count=50)
    assert asked in ([], [0])  # none on a machine that stood still
