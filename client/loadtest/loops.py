"""Send requests in a closed loop or in an open one, and hand over a record of each."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from loadtest.errors import ServerGoneError
from loadtest.record import Outcome, Record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from loadtest.record import Request

    Done = Callable[[Record], None]

_T = TypeVar("_T")


class Client(Protocol):
    """Sends one request at a time to a server."""

    async def ask(self, request: Request, record: Record) -> None:
        """Send the request, and call ``record.add`` for each response.

        A failure that the run counts is noted in the record. An exception ends the run.
        """


async def closed_loop(
    clients: Sequence[Client],
    conversations: Iterator[Sequence[Request]],
    done: Done,
    *,
    until: float = float("inf"),
) -> None:
    """Let each client send its next request when its last answer is complete.

    Args:
        clients: each has one request at a time.
        conversations: each is a list of requests, and a request repeats the earlier ones with
            their answers. A single request is a conversation, too.
        done: gets each record when it is complete.
        until: no request starts later (seconds of ``time.perf_counter``).
    """

    async def work(client: Client) -> None:
        """Send one request after the other, as long as there are any."""
        # The workers share the iterator, so that a fast client sends more of the requests.
        for turns in _before(until, conversations):
            history = ""
            for turn in _before(until, turns):
                request = replace(turn, prompt=history + turn.prompt) if history else turn
                record = await _ask(client, request, done)
                # A later turn repeats the conversation so far, as chat clients do. Without a later
                # turn, copying the text would only take the load generator's time.
                if len(turns) > 1:
                    history = f"{request.prompt} {record.text} "

    workers = [asyncio.create_task(work(client)) for client in clients]
    try:
        await asyncio.gather(*workers)
    finally:
        await _cancel(workers)


async def open_loop(
    clients: Sequence[Client],
    requests: Iterable[tuple[float, Request]],
    done: Done,
    *,
    started: float,
    until: float = float("inf"),
    give_up: float = float("inf"),
) -> None:
    """Send each request when it is due, whether the earlier ones have ended or not.

    If all clients are busy, a request waits for one. It still counts from the time it was due.

    Args:
        clients: each has one request at a time, so their number limits the requests in flight.
        requests: requests and when they are due, in seconds from ``started``, in this order.
        done: gets each record when it is complete.
        started: start of the loop (seconds of ``time.perf_counter``).
        until: no request starts later (the same clock).
        give_up: requests that have not ended by then are cancelled (the same clock).
    """
    # The client that was used last comes first, so that no more connections are used than needed.
    free: list[Client] = list(reversed(clients))
    places = asyncio.Semaphore(len(clients))  # one for each free client
    tasks: set[asyncio.Task[None]] = set()
    # Gets the exception of a request that ends the run.
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def answer(client: Client, request: Request, due: float) -> None:
        """Send one request, wait for its answer, and free the client."""
        try:
            await _ask(client, request, done, due=due)
        # An exception ends the run at once, as in a closed loop.
        except Exception as error:  # noqa: BLE001 - raised again below
            if not failed.done():
                failed.set_exception(error)
        free.append(client)
        places.release()

    async def send_all() -> None:
        """Start each request when it is due and a client is free; wait for the last answers."""
        for at, request in requests:
            due = started + at
            # Also if the request is late: sleep(0) lets the other tasks run.
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await places.acquire()
            if time.perf_counter() >= until:
                break
            task = asyncio.create_task(answer(free.pop(), request, due))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)

    sender = asyncio.create_task(send_all())
    left = give_up - time.perf_counter()  # seconds; infinite without a limit
    try:
        await asyncio.wait(
            {sender, failed},
            timeout=None if left == float("inf") else max(0.0, left),
            return_when=asyncio.FIRST_COMPLETED,
        )
        # Raise the exception, if there is one. Neither is done if `give_up` has come.
        if failed.done():
            failed.result()
        elif sender.done():
            sender.result()
    finally:
        failed.cancel()
        await _cancel([sender, *tasks])


async def _ask(client: Client, request: Request, done: Done, *, due: float | None = None) -> Record:
    """Send a request, and pass its record to ``done`` and return it when it is complete.

    Args:
        client: sends it.
        request: the request.
        done: gets the record, whether the request was answered, failed or was cancelled.
        due: when it should be sent (seconds of ``time.perf_counter``). None means now.
    """
    now = time.perf_counter()
    record = Record(request, due=now if due is None else due, sent=now)
    try:
        await client.ask(request, record)
    except asyncio.CancelledError:
        # Counted, so that every request that was sent has an outcome. One that has failed, and
        # waits for the server, keeps its own.
        if record.outcome is None:
            record.outcome = Outcome.CANCELLED
        done(record)
        raise
    except ServerGoneError:
        # The record says that this request has failed.
        done(record)
        raise
    if record.outcome is None:
        record.outcome = Outcome.ANSWERED
    done(record)
    return record


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _before(until: float, items: Iterable[_T]) -> Iterator[_T]:
    """Yield the items, and none after ``until`` (seconds of ``time.perf_counter``)."""
    for item in items:
        if time.perf_counter() >= until:
            return
        yield item
