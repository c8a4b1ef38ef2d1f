"""Send requests to a target: a closed loop of workers, or open-loop Poisson arrivals, with the same clients."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from harness.metrics import Answer, Measurement, summarize
from harness.workload import conversations

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from harness.workload import Load, Turn


@dataclass(frozen=True)
class Request:
    """One request to a target."""

    prompt: str
    answer_tokens: int
    stream: bool


class Client(Protocol):
    """A connection that answers one request at a time."""

    async def ask(self, request: Request, answer: Answer) -> None:
        """Send the prompt, call ``answer.add`` for each piece of text that arrives, and return after the last piece."""

    async def close(self) -> None:
        """Release the connection."""


class WrongAnswerError(Exception):
    """A target sent another number of tokens than requested, or too few answers."""


async def run_load(clients: Sequence[Client], load: Load) -> Measurement:
    """Send ``load`` to one target through ``clients``.

    Raises:
        WrongAnswerError: an answer has another number of tokens than requested, or there are too few answers.
    """
    gc.collect()
    gc.disable()  # a full collection in the load generator would count as a pause of the target
    started = time.perf_counter()
    try:
        answers, unfinished = await (_open_loop if load.rate else _closed_loop)(
            clients, load, started
        )
    finally:
        gc.enable()
    # A window of time sends as many requests as fit into it.
    wanted = 1 if load.seconds else load.requests
    if len(answers) < wanted:
        raise WrongAnswerError(
            f"{len(answers)} answers to {wanted} requests, {unfinished} unfinished"
        )
    return summarize(answers, max(answer.times[-1] for answer in answers) - started, unfinished)


async def _closed_loop(
    clients: Sequence[Client], load: Load, started: float
) -> tuple[list[Answer], int]:
    answers: list[Answer] = []
    asked = conversations(load)
    until = started + load.seconds if load.seconds else float("inf")

    async def work(client: Client) -> None:
        for turns in _before(until, asked):
            said = ""
            for turn in _before(until, iter(turns)):
                request = Request(said + turn.text, turn.answer_tokens, load.stream)
                answers.append(await _ask(client, request, time.perf_counter()))
                # A later turn repeats the conversation so far, as chat clients do.
                said = f"{request.prompt} {answers[-1].text} " if len(turns) > 1 else ""

    await asyncio.gather(*(work(client) for client in clients))
    return answers, 0


def arrival_times(load: Load) -> list[float]:
    """Return the times at which requests are due (s): rate * seconds of them, equal for every target with the same seed.

    For a given number, the arrivals of a Poisson process are independent and uniform. So each seed has the same mean rate.
    """
    source = random.Random(load.seed)
    window = load.seconds or load.requests / load.rate
    return sorted(
        source.uniform(0, window)
        for _ in range(min(load.requests, max(1, round(load.rate * window))))
    )


async def _open_loop(
    clients: Sequence[Client], load: Load, started: float
) -> tuple[list[Answer], int]:
    """Send each request when it is due; cancel those that have not ended after twice the window and ten seconds."""
    times = arrival_times(load)
    free: asyncio.LifoQueue[Client] = asyncio.LifoQueue()
    for client in clients:
        free.put_nowait(client)

    async def answer(turn: Turn, due: float) -> Answer:
        client = await free.get()
        reply = await _ask(client, Request(turn.text, turn.answer_tokens, load.stream), due)
        free.put_nowait(client)
        return reply

    tasks = []
    for at, (turn,) in zip(times, conversations(load), strict=False):
        await asyncio.sleep(max(0.0, started + at - time.perf_counter()))
        tasks.append(asyncio.create_task(answer(turn, started + at)))
    limit = started + 2 * (load.seconds or times[-1]) + 10 - time.perf_counter()
    # A wrong answer ends the run at once.
    done, late = await asyncio.wait(
        tasks, timeout=max(0.0, limit), return_when=asyncio.FIRST_EXCEPTION
    )
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    return [task.result() for task in done], len(late)


async def _ask(client: Client, request: Request, started: float) -> Answer:
    answer = Answer(started, sent_late=max(0.0, time.perf_counter() - started))
    await client.ask(request, answer)
    if answer.tokens != request.answer_tokens:
        raise WrongAnswerError(
            f"an answer has {answer.tokens} tokens instead of {request.answer_tokens}"
        )
    return answer


def _before(until: float, turns: Iterator[Turn] | Iterator[list[Turn]]) -> Iterator:
    while time.perf_counter() < until and (turn := next(turns, None)) is not None:
        yield turn
