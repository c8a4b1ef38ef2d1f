"""A whole run: wait for the model, warm up, send the load, and collect what happened."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from loadtest import loops, overhead
from loadtest.answers import JsonLines, TextStore
from loadtest.backends import client_for
from loadtest.endpoint import Endpoint
from loadtest.errors import ClientError, ServerGoneError
from loadtest.measures import Measures
from loadtest.options import MAX_CONCURRENCY, RANDOM_OUTPUT_LEN
from loadtest.overhead import Overhead
from loadtest.progress import ProgressLine
from loadtest.prompts import RepeatedPrompts, RequestSettings, make_requests
from loadtest.record import Outcome
from loadtest.shape import places_for, send_load, until_interrupt
from loadtest.versus import Comparison, send_in_turns

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from loadtest.endpoint import Backend
    from loadtest.prompts import PromptSource
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
        model: name of the model that was asked.
        measures: the figures.
        overhead: the client's own part.
        duration: seconds from the start of the sending to the end of the last request.
        interrupted: whether Ctrl-C ended the run.
        gone: why the run ended early, if the server did not come back.
        texts: the texts of all answers; None if nobody needs them.
        comparison: with a second server; all other figures are the first one's.
        first: the answers to the first prompts.
        reasons: the reasons of failures, each with the first request and the number of requests.
            Those of the second server begin with its address.
    """

    planned: int | None
    model: str
    measures: Measures
    overhead: Overhead = field(default_factory=Overhead)
    duration: float = 0.0
    interrupted: bool = False
    gone: str = ""
    texts: TextStore | None = None
    comparison: Comparison | None = None
    first: dict[int, Record] = field(default_factory=dict)
    reasons: dict[str, tuple[Record, int]] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        """Note that a request has ended."""
        self.measures.add(record)
        if self.texts:
            self.texts.add(record)
        if record.outcome is Outcome.ANSWERED and record.request.index < _FIRST_ANSWERS:
            self.first[record.request.index] = record
        self._count_reason(record, record.reason)

    def add_second(self, record: Record) -> None:
        """Note that a request to the second server has ended."""
        if self.comparison:
            self.comparison.second.add(record)
            self._count_reason(record, f"{self.comparison.url}: {record.reason}")

    def _count_reason(self, record: Record, reason: str) -> None:
        """Count the reason, if the request has failed and not too many reasons are known."""
        has_room = reason in self.reasons or len(self.reasons) < _MOST_REASONS
        if record.outcome is Outcome.FAILED and has_room:
            first, count = self.reasons.get(reason, (record, 0))
            self.reasons[reason] = (first, count + 1)


def run(options: argparse.Namespace, prompts: PromptSource, count: int | None) -> Result:
    """Send the load.

    Args:
        options: the command line.
        prompts: the prompts.
        count: number of requests; None if only the time limits it.

    Raises:
        ClientError: there is no such server or no such model, or a results file cannot be written.
    """
    return asyncio.run(_run(options, prompts, count))


async def _run(options: argparse.Namespace, prompts: PromptSource, count: int | None) -> Result:
    """Wait for the models, warm up, and measure; see ``run``.

    Raises:
        KeyboardInterrupt: Ctrl-C came before the measurement.
    """
    settings = RequestSettings(
        stream=options.streaming_mode,
        parameters=_sampling(options),
        cancel_rate=options.cancel_rate,
        seed=options.seed,
    )
    servers = [(options.backend, options.url, options.model)]
    if options.versus:
        servers.append((options.versus_backend, options.versus, options.versus_model))
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for backend, url, model in servers:
            endpoint = _endpoint(options, url, model)
            clients.append(await stack.enter_async_context(client_for(backend)(endpoint)))

        async def prepare() -> None:
            """Check the models, send the warm-up requests, and open the connections."""
            for client in clients:
                await client.require_model(prompts.inputs)
                if "tpot" in options.goodput and not client.counts_tokens:
                    raise ClientError(
                        f"the model {client.model!r} does not count tokens, and a goal for tpot "
                        "(--goodput) needs them; leave it out, or use a server that counts them"
                    )
                if options.num_warmups:
                    await _warm_up(client, prompts, settings, options)
            # With two servers, `send_in_turns` opens the connections before each block. An open
            # loop without a limit may need more of them. It opens those when it needs them.
            if not options.versus:
                places = places_for(options.max_concurrency or MAX_CONCURRENCY, count)
                await clients[0].connect(places)

        if await until_interrupt(prepare(), lambda: _stop(clients)):
            raise KeyboardInterrupt  # there is nothing to report yet
        load = make_requests(prompts, settings, count=count)
        return await _measure(clients, load, options, count)


def _sampling(options: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters of all requests."""
    sampling: dict[str, Any] = dict(_SAMPLING)
    if options.random_input_len:
        # Answers of exactly this length, as `vllm bench serve` asks for.
        length = options.random_output_len or RANDOM_OUTPUT_LEN
        sampling |= {"max_tokens": length, "ignore_eos": True}
    if options.lora_name:
        sampling["lora_name"] = options.lora_name
    return sampling


def _endpoint(options: argparse.Namespace, url: str, model: str) -> Endpoint:
    """Return the model at a server, with the connection that the command line asks for."""
    tls = {"ssl": options.ssl}
    tls |= {
        name: str(path)
        for name in ("root_certificates", "private_key", "certificate_chain")
        if (path := getattr(options, name))
    }
    return Endpoint(
        url=url,
        model=model,
        exclude_input=options.exclude_inputs_in_outputs,
        stream_timeout=options.stream_timeout,
        first_id=options.offset,
        wait_ready=options.wait_ready,
        reconnect=options.reconnect,
        headers=options.header,
        tls=tls,
    )


def _stop(clients: Sequence[Backend]) -> None:
    for client in clients:
        client.stop()


async def _warm_up(
    client: Backend,
    prompts: PromptSource,
    settings: RequestSettings,
    options: argparse.Namespace,
) -> None:
    """Send the warm-up requests to a server, and wait for the answers.

    Raises:
        ClientError: one of them failed.
    """
    # The first prompt only, as in `vllm bench serve`. Otherwise vLLM's prefix cache would hold the
    # prompts that are measured.
    first = RepeatedPrompts((next(iter(prompts)),))
    # None of them is given up early, whatever --cancel-rate is.
    uncancelled = replace(settings, cancel_rate=0.0)
    requests = make_requests(first, uncancelled, count=options.num_warmups)

    def done(record: Record) -> None:
        if record.outcome is Outcome.FAILED:
            client.stop()
            raise ClientError(f"a warm-up request failed: {record.reason}; see the server's log")

    places = places_for(options.max_concurrency or MAX_CONCURRENCY, options.num_warmups)
    await loops.closed_loop([client] * places, ((request,) for request in requests), done)


async def _measure(
    clients: Sequence[Backend],
    requests: Iterator[Request],
    options: argparse.Namespace,
    count: int | None,
) -> Result:
    """Send the load, and return what happened, also after Ctrl-C or if the server has gone.

    Args:
        clients: the client of each server.
        requests: the requests.
        options: the command line.
        count: number of requests; None if only the time limits it.

    Raises:
        ClientError: a results file cannot be written.
    """
    progress = ProgressLine(total=count, seconds=options.duration, stream=sys.stderr)
    # Python's garbage collector then leaves alone what exists now. So it needs less time, which
    # would count as the server's.
    gc.collect()
    gc.freeze()
    started = time.perf_counter()
    result = Result(
        planned=count,
        model=clients[0].model,
        measures=Measures(options.goodput, started),
    )
    with contextlib.closing(progress), contextlib.ExitStack() as files:
        # Each of them gets each record.
        sinks = [result.add, progress.advance]
        if options.results_format == "jsonl":
            lines = JsonLines(options.results_file, started)
            files.enter_context(contextlib.closing(lines))
            sinks.append(lines.add)
        if options.results_format == "txt" or options.verbose:
            result.texts = TextStore(_folder(options.results_file))

        def done(record: Record) -> None:
            """Hand over the record of a request that has ended. An error ends the run."""
            try:
                for sink in sinks:
                    sink(record)
            except Exception:
                # The loop cancels the other requests.
                _stop(clients)
                raise

        async def send() -> None:
            """Send the load to the server, or to two in turns, and wait for all answers."""
            if count is None or not options.versus:
                async with overhead.watch(result.overhead):
                    await send_load(clients[0], requests, options, done, count=count)
                return
            result.comparison = Comparison(
                options.versus,
                options.versus_backend,
                clients[1].model,
                overhead=result.overhead,
            )
            await send_in_turns(
                clients,
                requests,
                options,
                (done, result.add_second),
                count=count,
                comparison=result.comparison,
            )

        try:
            result.interrupted = await until_interrupt(send(), lambda: _stop(clients))
        except ServerGoneError as error:
            result.gone = str(error)
    result.duration = time.perf_counter() - started
    # The figures are the first server's. The time of the other one's blocks is no part of them.
    if result.comparison:
        result.duration = result.comparison.first_seconds
    return result


def _folder(results: Path) -> Path | None:
    """Return the folder for temporary texts: the results go there, so it should have room."""
    is_device = results.exists() and not results.is_file()
    return None if is_device else results.parent
