"""Compare the serving speed of vLLM's engine alone, vLLM's own server, and this project's model.

All targets are up at the same time, with the same engine arguments and executor. They get the load
in turns, in rounds. Other work on the machine then slows all of them down:

    python3 benchmarks/serving.py --environment ENV --triton-root ROOT

`ENV` is an unpacked environment, whose `bin/python` has vLLM. The Python that runs this needs
tritonclient[grpc], and aiohttp for vLLM's server. A table and the figures of each round go to new
files next to `--out`, and a row to `runs.md` in that folder.
`--in-flight 128 --modes stream --shares 0.5 0.8 0.95` adds open-loop arrivals.
"""

from __future__ import annotations

import itertools
import json
import shlex
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from harness import executors, machine, report, results
from harness.options import parse
from harness.processes import exit_on_sigterm, first_in_line
from harness.servers import Setting
from harness.shapes import SHAPES, write_checkpoint
from harness.targets import Target, make_targets, require_openai_client
from harness.workload import Load, most_tokens

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from harness.metrics import Measurement

# enforce_eager avoids a run of the compiler.
_CPU = {"dtype": "float32", "enforce_eager": True, "max_model_len": 2048}
_GPU = {"dtype": "float16", "max_model_len": 512}
# For all engines together.
_GPU_MEMORY = 0.93
# vLLM's defaults differ between its server and an engine. Here, all targets have the same limits.
_LIMITS = {"max_num_seqs": 512, "max_num_batched_tokens": 8192}


@dataclass
class Run:
    """One run of the benchmark.

    Attributes:
        options: the command line's options.
        command: the command line.
        conditions: the machine, versions and commit.
        notes: lines for the head of the report.
        rounds: the measurements so far.
        out: the report's path without suffix; None until there is a measurement.
    """

    options: argparse.Namespace
    command: str
    conditions: machine.Machine
    notes: list[str]
    rounds: list[report.Round] = field(default_factory=list)
    out: Path | None = None

    def add(self, cell: report.Cell, targets: list[Target]) -> None:
        """Measure one cell on all targets, and print the cell's table.

        The report is written after each measurement.
        """
        measured = []
        title = f"Serving, {self.options.shape} shape, dummy weights"
        for entry in run_cell(targets, cell, self.options):
            measured.append(entry)
            self.rounds.append(entry)
            self.out = self.out or results.reserve(
                self.options.out, self.conditions.commit, self.command
            )
            # After each one, because the machine may be taken away.
            report.write(self.out, title, self.conditions, self.notes, self.rounds)
        print(f"\n{cell.title}\n{report.table(measured)}", flush=True)


def closed_cells(options: argparse.Namespace) -> list[report.Cell]:
    """Return the closed loops to measure, the lightest first."""
    # The last option varies fastest.
    settings = itertools.product(
        options.prompt_tokens, options.tokens, options.in_flight, options.modes
    )
    return [
        report.Cell(
            stream=mode == "stream",
            in_flight=in_flight,
            answer_tokens=tokens,
            prompt_tokens=prompt,
            workload=options.workload,
        )
        for prompt, tokens, in_flight, mode in settings
    ]


def capacity(rounds: list[report.Round], like: report.Cell) -> tuple[float, str]:
    """Return the requests/s and the name of the slowest target, with the most streams in flight.

    The requests/s of a target are the median over its rounds.

    Args:
        rounds: the measured closed loops.
        like: an open loop. Only loads with its tokens and its workload count.
    """
    closed = replace(like, rate=0.0)
    # The cells that differ from `closed` at most in the number of streams.
    found = [entry for entry in rounds if replace(entry.cell, in_flight=closed.in_flight) == closed]
    most = max(entry.cell.in_flight for entry in found)
    speeds: dict[str, list[float]] = defaultdict(list)
    for entry in found:
        if entry.cell.in_flight == most:
            speeds[entry.target].append(entry.measured.request_throughput)
    return min((median(values), name) for name, values in speeds.items())


def open_cells(
    options: argparse.Namespace, rounds: list[report.Round], notes: list[str]
) -> list[report.Cell]:
    """Return the open loops to measure, the lowest rates first.

    Args:
        options: the command line's options.
        rounds: the measured closed loops, which tell the capacity.
        notes: gets a line with the capacity, if rates are shares of it.
    """
    cells = []
    for prompt, tokens in itertools.product(options.prompt_tokens, options.tokens):
        like = report.Cell(
            stream=True,
            in_flight=options.most_in_flight,
            answer_tokens=tokens,
            prompt_tokens=prompt,
            workload=options.workload,
        )
        rates = list(options.rates)
        if options.shares:
            # Above the capacity of one target, its queue would only grow.
            full_rate, slowest = capacity(rounds, like)
            rates += [share * full_rate for share in options.shares]
            meanings = [f"{share:g} is {share * full_rate:.4g}/s" for share in options.shares]
            notes.append(
                f"capacity, {prompt} + {tokens} tokens: {full_rate:.4g} requests/s, "
                f"the slowest's ({slowest}); {', '.join(meanings)}"
            )
        cells += [replace(like, rate=rate) for rate in sorted(rates)]
    return cells


def load_of(cell: report.Cell, options: argparse.Namespace, seed: int) -> Load:
    """Return the load of a cell; with the same seed, all targets get the same requests."""
    return Load(
        in_flight=cell.in_flight,
        requests=options.requests,
        prompt_tokens=cell.prompt_tokens,
        answer_tokens=cell.answer_tokens,
        stream=cell.stream,
        vocabulary=SHAPES[options.shape].vocabulary,
        seed=seed,
        seconds=options.seconds,
        rate=cell.rate,
        workload=cell.workload,
        turns=options.turns,
    )


def measure(target: Target, load: Load) -> tuple[Measurement, dict[str, float]]:
    """Return the measurement of a load and the CPU seconds that each role used for it."""
    before = {**target.cpu(), "load": time.process_time()}
    with first_in_line():
        measured = target.measure(load)
    after = {**target.cpu(), "load": time.process_time()}
    # A process that has started meanwhile is not in `before`.
    used = {role: seconds - before.get(role, 0.0) for role, seconds in after.items()}
    return measured, used


def run_cell(
    targets: list[Target], cell: report.Cell, options: argparse.Namespace
) -> Iterator[report.Round]:
    """Measure one cell: a warm-up of each target, then the rounds. Yield each measurement."""
    # 1) Warm up
    for target in targets:
        # In open loop, in_flight is only an upper bound, too large for a warm-up.
        count = min(cell.in_flight, 32) if cell.rate else cell.in_flight
        load = load_of(cell, options, seed=0)
        say(f"{cell.title}: warm-up of {target.name}")
        target.measure(replace(load, in_flight=count, requests=count, seconds=0.0, rate=0.0))
    # 2) Measure; each round begins with another target
    for number in range(options.rounds):
        first = number % len(targets)
        for target in targets[first:] + targets[:first]:
            step = f"round {number + 1} of {options.rounds}, {options.seconds:g} s"
            say(f"{cell.title}: {target.name}, {step}")
            # vLLM spins for 1 s after its last request. The previous target would slow this one
            # down.
            time.sleep(options.settle)
            measured, used = measure(target, load_of(cell, options, seed=number + 1))
            memory = target.resident()
            yield report.Round(cell, target.name, number, measured, used, memory)


def start(target: Target, notes: list[str]) -> None:
    """Start a target; note the time that it took and its executor."""
    say(f"starting {target.name}")
    took = target.start()
    notes.append(f"{target.name} ready after {took:.1f} s, executor: {target.executor()}")
    say(notes[-1])


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


def plan(options: argparse.Namespace, targets: int) -> str:
    """Return the number of measurements and about how long they take, without the starts.

    Args:
        options: the command line's options.
        targets: the number of targets.
    """
    lengths = len(options.prompt_tokens) * len(options.tokens)
    # The open loops are not known yet, as `open_cells` needs the capacity. Their number is.
    open_count = lengths * (len(options.rates) + len(options.shares))
    count = (len(closed_cells(options)) + open_count) * targets * options.rounds
    # The last answers of a window take about one more second.
    minutes = count * (options.seconds + options.settle + 1) / 60
    return f"{count} measurements of {options.seconds:g} s: about {minutes:.0f} minutes"


def prepare(options: argparse.Namespace, arguments: list[str]) -> tuple[Run, Setting]:
    """Return the run with the head of its report, and the setting that all targets share.

    Args:
        options: the command line's options.
        arguments: the command line.

    Raises:
        SystemExit: the longest request does not fit into the model's maximum length, or aiohttp is
            missing.
    """
    # Without aiohttp, end now, and not after the targets have started.
    if {"openai", "port"} & set(options.targets):
        require_openai_client()
    work = (options.work or Path(tempfile.mkdtemp(prefix="serving_"))).absolute()
    checkpoint = write_checkpoint(SHAPES[options.shape], work / options.shape)
    defaults: dict[str, Any] = _CPU
    if options.device == "gpu":
        # All engines are up at the same time, and each gets an equal part of the memory.
        # The OpenAI port has no engine of its own.
        engines = set(options.targets) - {"port"}
        part = round(_GPU_MEMORY / len(engines), 2)
        defaults = {**_GPU, "gpu_memory_utilization": part}
    # The user's engine arguments come last, and replace ours.
    engine = {
        "model": str(checkpoint),
        "load_format": "dummy",
        **defaults,
        **_LIMITS,
        **options.engine_arguments,
    }
    engine.update(executors.argument(options.executor, engine))
    # A turn repeats the conversation so far, which the prefix cache holds.
    if options.workload == "multi-turn":
        engine.setdefault("enable_prefix_caching", True)
    # If a request is too long, end now, too.
    longest = engine["max_model_len"]
    for cell in closed_cells(options):
        if most_tokens(load_of(cell, options, seed=0)) > longest:
            raise SystemExit(
                f"{cell.title}: longer than max_model_len {longest}; use --engine-arguments"
            )
    setting = Setting.of(options, engine, work, options.instances)
    versions = machine.versions_of(setting.environment)
    command = f"python3 benchmarks/serving.py {shlex.join(arguments)}"
    # Tried here only to note whether it works. The servers, which are started later, must not
    # inherit the priority.
    with first_in_line() as allowed:
        priority = "runs before the servers (SCHED_RR)"
        if not allowed:
            priority = "has no priority, which takes root: its gaps may be bursts"
    run = Run(
        options=options,
        command=command,
        conditions=machine.describe(versions, setting.triton_root, commit=options.commit),
        notes=[
            f"command: `{command}`",
            f"engine arguments: `{json.dumps({**engine, 'model': options.shape})}`",
            f"environment of all targets: `{json.dumps(setting.variables)}`",
            f"the load generator {priority}",
        ],
    )
    return run, setting


def main(arguments: list[str]) -> int:
    """Start the targets and measure every cell, which writes the report; return the exit code 0."""
    options = parse(arguments, __doc__)
    exit_on_sigterm()
    run, setting = prepare(options, arguments)
    targets = make_targets(options.targets, setting)
    say(plan(options, len(targets)))
    try:
        for target in targets:
            start(target, run.notes)
        for cell in closed_cells(options):
            run.add(cell, targets)
        for cell in open_cells(options, run.rounds, run.notes):
            run.add(cell, targets)
    finally:
        for target in targets:
            target.stop()
        say(f"report: {f'{run.out}.md' if run.out else 'none'}, logs: {setting.work}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
