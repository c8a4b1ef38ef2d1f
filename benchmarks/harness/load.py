"""Send requests to a target, in a closed loop or in an open one, with the same clients."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from harness.metrics import Answer, Measurement, summarize
from harness.workload import conversations

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from harness.workload import Load, Turn

_T = TypeVar("_T")


@dataclass(frozen=True)
class Request:
    """One request to a target."""

    prompt: str
    answer_tokens: int
    stream: bool


class Client(Protocol):
    """A connection that answers one request at a time."""

    async def ask(self, request: Request, answer: Answer) -> None:
        """Send the prompt, and call ``answer.add`` for each piece of text until the last one."""

    async def close(self) -> None:
        """Release the connection."""


class WrongAnswerError(Exception):
    """A target sent too few answers, or an answer with another number of tokens than requested."""


async def run_load(clients: Sequence[Client], load: Load) -> Measurement:
    """Send ``load`` to one target through ``clients``.

    Args:
        clients: connections to the target. Each has one request at a time.
        load: the requests.

    Raises:
        WrongAnswerError: an answer has another number of tokens than requested, or there are too
            few answers.
    """
    # A full collection in the load generator would count as a pause of the target.
    gc.collect()
    gc.disable()
    send = _open_loop if load.rate else _closed_loop
    started = time.perf_counter()
    try:
        answers, unfinished = await send(clients, load, started)
    finally:
        gc.enable()
    # A window of time sends as many requests as fit into it.
    wanted = 1 if load.seconds else load.requests
    if len(answers) < wanted:
        raise WrongAnswerError(
            f"{len(answers)} answers to {wanted} requests, {unfinished} unfinished"
        )
    ended = max(answer.times[-1] for answer in answers)
    return summarize(answers, ended - started, unfinished)


async def _closed_loop(
    clients: Sequence[Client], load: Load, started: float
) -> tuple[list[Answer], int]:
    """Let each client send its next request when its last answer is complete."""
    answers: list[Answer] = []
    # Shared, so that a fast client sends more of them.
    waiting = conversations(load)
    until = started + load.seconds if load.seconds else float("inf")

    async def work(client: Client) -> None:
        for turns in _before(until, waiting):
            history = ""
            for turn in _before(until, turns):
                request = Request(history + turn.text, turn.answer_tokens, load.stream)
                answer = await _ask(client, request, time.perf_counter())
                answers.append(answer)
                # A later turn repeats the conversation so far, as chat clients do. Without a later
                # turn, copying the text would only take the load generator's time.
                if len(turns) > 1:
                    history = f"{request.prompt} {answer.text} "

    await asyncio.gather(*map(work, clients))
    return answers, 0


def arrival_times(load: Load) -> list[float]:
    """Return the times at which requests are due, in seconds from the start.

    There are rate * seconds of them, and every target with the same seed gets the same ones.
    """
    source = random.Random(load.seed)
    window = load.seconds or load.requests / load.rate
    count = min(load.requests, max(1, round(load.rate * window)))
    # For a given number, the arrivals of a Poisson process are independent and uniform. A number
    # that is random, too, would give each seed another mean rate.
    return sorted(source.uniform(0, window) for _ in range(count))


async def _open_loop(
    clients: Sequence[Client], load: Load, started: float
) -> tuple[list[Answer], int]:
    """Send each request when it is due, whether the earlier ones have ended or not."""
    times = arrival_times(load)
    # The client that was used last comes first, so that no more connections are used than needed.
    free: asyncio.LifoQueue[Client] = asyncio.LifoQueue()
    for client in clients:
        free.put_nowait(client)

    async def answer(turn: Turn, due: float) -> Answer:
        client = await free.get()
        reply = await _ask(client, Request(turn.text, turn.answer_tokens, load.stream), due)
        free.put_nowait(client)
        return reply

    # 1) Send
    tasks = []
    for at, (turn,) in zip(times, conversations(load), strict=False):
        await asyncio.sleep(max(0.0, started + at - time.perf_counter()))
        tasks.append(asyncio.create_task(answer(turn, started + at)))
    # 2) Wait until twice the window and ten seconds; a wrong answer ends the run at once
    limit = started + 2 * (load.seconds or times[-1]) + 10 - time.perf_counter()
    done, late = await asyncio.wait(
        tasks, timeout=max(0.0, limit), return_when=asyncio.FIRST_EXCEPTION
    )
    # 3) Give up the rest
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


def _before(until: float, items: Iterable[_T]) -> Iterator[_T]:
    for item in items:
        if time.perf_counter() >= until:
            return
        yield item
