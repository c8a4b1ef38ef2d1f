"""A whole run: wait for the model, warm up, send the load, and collect what happened."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from loadtest import loops, overhead
from loadtest.answers import JsonLines, TextStore
from loadtest.arrivals import arrival_times
from loadtest.errors import ClientError
from loadtest.measures import Measures
from loadtest.options import MAX_CONCURRENCY, RANDOM_OUTPUT_LEN
from loadtest.progress import ProgressLine
from loadtest.prompts import RequestSettings, make_requests
from loadtest.record import Outcome
from loadtest.triton import Endpoint, TritonClient

if TYPE_CHECKING:
    import argparse
    from collections.abc import Coroutine, Iterator, Sequence
    from pathlib import Path

    from loadtest.overhead import Overhead
    from loadtest.prompts import Prompt
    from loadtest.record import Record, Request

# Greedy, so that the same prompt gives the same answer every time; the length is the tutorial's.
_SAMPLING = {"temperature": 0, "max_tokens": 100}
# Reasons of failures that are shown. A run of hours may have a new one for each request.
_MOST_REASONS = 20
# Answers that are shown after a run.
_FIRST_ANSWERS = 3


@dataclass
class Result:
    """What a run has found out.

    Attributes:
        planned: number of requests; None if only the time limited it.
        tokens_counted: whether the server counts tokens.
        measures: the figures.
        overhead: the client's own part.
        duration: seconds from the start of the sending to the end of the last request.
        interrupted: whether Ctrl-C ended the run.
        texts: the texts of all answers; None if nobody needs them.
        first: the answers to the first prompts.
        reasons: the reasons of failures, each with the first request and the number of requests.
    """

    planned: int | None
    tokens_counted: bool
    measures: Measures
    overhead: Overhead
    duration: float = 0.0
    interrupted: bool = False
    texts: TextStore | None = None
    first: dict[int, Record] = field(default_factory=dict)
    reasons: dict[str, tuple[Record, int]] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        """Note that a request has ended."""
        self.measures.add(record)
        if self.texts:
            self.texts.add(record)
        if record.outcome is Outcome.ANSWERED and record.request.index < _FIRST_ANSWERS:
            self.first[record.request.index] = record
        known = record.reason in self.reasons or len(self.reasons) < _MOST_REASONS
        if record.outcome is Outcome.FAILED and known:
            first, count = self.reasons.get(record.reason, (record, 0))
            self.reasons[record.reason] = (first, count + 1)


def run(options: argparse.Namespace, prompts: Sequence[Prompt], count: int | None) -> Result:
    """Send the load.

    Args:
        options: the command line.
        prompts: the prompts.
        count: number of requests; None if only the time limits it.

    Raises:
        ClientError: there is no such server or no such model, or a results file cannot be written.
    """
    return asyncio.run(_run(options, prompts, count))


async def _run(options: argparse.Namespace, prompts: Sequence[Prompt], count: int | None) -> Result:
    settings = RequestSettings(
        stream=options.streaming_mode,
        parameters=_sampling(options),
        cancel_rate=options.cancel_rate,
        seed=options.seed,
    )
    async with TritonClient(_endpoint(options)) as client:
        await client.require_model(
            texts=any(not prompt.is_chat for prompt in prompts),
            chats=any(prompt.is_chat for prompt in prompts),
            images=any(prompt.images for prompt in prompts),
        )
        if options.num_warmups:
            calm = replace(settings, cancel_rate=0.0)
            warmups = make_requests(prompts, calm, count=options.num_warmups)
            await _warm_up(client, warmups, options)
        load = make_requests(prompts, settings, count=count)
        return await _measure(client, load, options, count)


def _sampling(options: argparse.Namespace) -> dict[str, Any]:
    sampling: dict[str, Any] = dict(_SAMPLING)
    if options.random_input_len:
        # Answers of exactly this length, as `vllm bench serve` asks for.
        length = options.random_output_len or RANDOM_OUTPUT_LEN
        sampling |= {"max_tokens": length, "ignore_eos": True}
    if options.lora_name:
        sampling["lora_name"] = options.lora_name
    return sampling


def _endpoint(options: argparse.Namespace) -> Endpoint:
    tls = {"ssl": options.ssl}
    tls |= {
        name: str(path)
        for name in ("root_certificates", "private_key", "certificate_chain")
        if (path := getattr(options, name))
    }
    return Endpoint(
        url=options.url,
        model=options.model,
        exclude_input=options.exclude_inputs_in_outputs,
        stream_timeout=options.stream_timeout,
        first_id=options.offset,
        wait_ready=options.wait_ready,
        reconnect=options.reconnect,
        headers=options.header,
        tls=tls,
    )


async def _warm_up(
    client: TritonClient, requests: Iterator[Request], options: argparse.Namespace
) -> None:
    def done(record: Record) -> None:
        if record.outcome is Outcome.FAILED:
            raise ClientError(f"a warm-up request failed: {record.reason}; see the server's log")

    places = options.max_concurrency or MAX_CONCURRENCY
    await loops.closed_loop([client] * places, ((request,) for request in requests), done)


async def _measure(
    client: TritonClient,
    requests: Iterator[Request],
    options: argparse.Namespace,
    count: int | None,
) -> Result:
    # Before the start: for many requests this takes a while.
    times = _times(options, count)
    progress = ProgressLine(total=count, seconds=options.duration, stream=sys.stderr)
    # What exists now stays. The collector then needs less time, which would count as the server's.
    gc.collect()
    gc.freeze()
    async with overhead.watch() as watched:
        started = time.perf_counter()
        result = Result(
            planned=count,
            tokens_counted=client.counts_tokens,
            measures=Measures(options.goodput),
            overhead=watched,
        )
        with contextlib.closing(progress), contextlib.ExitStack() as files:
            sinks = [result.add, progress.advance]
            if options.results_format == "jsonl":
                lines = JsonLines(options.results_file, started)
                files.enter_context(contextlib.closing(lines))
                sinks.append(lines.add)
            if options.results_format == "txt" or options.verbose:
                result.texts = TextStore(_folder(options.results_file))

            def done(record: Record) -> None:
                for sink in sinks:
                    sink(record)

            limit = options.max_concurrency
            if times is None:
                until = started + options.duration if options.duration else math.inf
                places = min(limit or MAX_CONCURRENCY, count or MAX_CONCURRENCY)
                singles = ((request,) for request in requests)
                sending = loops.closed_loop([client] * places, singles, done, until=until)
            else:
                timed = zip(times, requests, strict=False)
                places = limit or len(times)
                sending = loops.open_loop([client] * places, timed, done, started=started)
            result.interrupted = await _until_interrupt(client, sending)
        result.duration = time.perf_counter() - started
    return result


def _times(options: argparse.Namespace, count: int | None) -> list[float] | None:
    """Return when the requests of an open loop are due; None for a closed loop."""
    # `request_count` gives every open loop a number.
    if options.request_rate == math.inf or count is None:
        return None
    return arrival_times(
        count=count,
        rate=options.request_rate,
        seed=options.seed,
        burstiness=options.burstiness,
    )


async def _until_interrupt(client: TritonClient, sending: Coroutine[Any, Any, None]) -> bool:
    """Wait for ``sending``; at the first Ctrl-C, cancel it. Return whether that has happened."""
    task = asyncio.ensure_future(sending)
    loop = asyncio.get_running_loop()
    interrupted = False

    def interrupt() -> None:
        nonlocal interrupted
        interrupted = True
        # The second Ctrl-C ends the program without a report.
        loop.remove_signal_handler(signal.SIGINT)
        client.stop()
        task.cancel()

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        await task
    except asyncio.CancelledError:
        if not interrupted:
            raise
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    return interrupted


def _folder(results: Path) -> Path | None:
    """Return the folder for temporary texts: that of the results, which has room for them."""
    is_device = results.exists() and not results.is_file()
    return None if is_device else results.parent
