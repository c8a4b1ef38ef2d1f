"""Compare the serving speed of vLLM's engine alone, of vLLM's own server, and of this project's model under tritonserver.

All targets are up at the same time, with the same engine arguments and executor. They get the load in turns, in rounds.
Other work on the machine then slows all of them down:

    python3 benchmarks/serving.py --environment ENV --triton-root ROOT

`ENV` is an unpacked environment, whose `bin/python` has vLLM. The Python that runs this needs tritonclient[grpc]. A table
and the figures of each round go to new files next to `--out`, and a row to `runs.md` in that folder.
`--in-flight 128 --modes stream --shares 0.5 0.8 0.95` adds open-loop arrivals.
"""

from __future__ import annotations

import json
import resource
import shlex
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from harness import executors, machine, report, results
from harness.options import parse
from harness.processes import exit_on_sigterm, first_in_line
from harness.servers import Setting
from harness.shapes import SHAPES, write_checkpoint
from harness.targets import TARGETS, Target
from harness.workload import Load, most_tokens

if TYPE_CHECKING:
    import argparse

    from harness.metrics import Measurement

_CPU = {"dtype": "float32", "enforce_eager": True, "max_model_len": 2048}
# By default, vLLM pins its CPU worker to core 0 and spins there. On two cores, every other process that the scheduler puts on
# that core then stops for seconds, with every target. Without pinning, the same load is up to six times as fast.
_CPU_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
_GPU = {"dtype": "float16", "max_model_len": 512}
_GPU_MEMORY = 0.93  # for all engines together
# vLLM's defaults differ between its server and an engine. Here, all targets have the same limits.
_LIMITS = {"max_num_seqs": 512, "max_num_batched_tokens": 8192}


@dataclass
class Run:
    """One run of the benchmark.

    Attributes:
        options: the command line's options.
        command: the command line.
        described: the machine.
        notes: lines for the head of the report.
        rounds: the measurements so far.
        out: the report's path without suffix; None until there is a measurement.
    """

    options: argparse.Namespace
    command: str
    described: machine.Machine
    notes: list[str]
    rounds: list[report.Round] = field(default_factory=list)
    out: Path | None = None

    def add(self, cell: report.Cell, targets: list[Target]) -> None:
        """Measure one cell on all targets, write the report and print the cell's table."""
        measured = run_cell(targets, cell, self.options)
        self.out = self.out or results.take(self.options.out, self.described.commit, self.command)
        self.rounds += measured
        title = f"Serving, {self.options.shape} shape, dummy weights"
        report.write(self.out, title, self.described, self.notes, self.rounds)
        print(f"\n{cell.title}\n{report.table(measured)}", flush=True)


def closed_cells(options: argparse.Namespace) -> list[report.Cell]:
    """Return the closed loops to measure, the lightest first."""
    return [
        report.Cell(mode == "stream", in_flight, tokens, prompt, options.workload)
        for prompt in options.prompt_tokens
        for tokens in options.tokens
        for in_flight in options.in_flight
        for mode in options.modes
    ]


def capacity(rounds: list[report.Round], like: report.Cell) -> tuple[float, str]:
    """Return the requests/s and the name of the slowest target, at the most in flight, for streaming loads like ``like``."""
    loads = [
        replace(entry.cell, in_flight=0) == replace(like, in_flight=0, rate=0.0) for entry in rounds
    ]
    found = [entry for entry, same in zip(rounds, loads, strict=True) if same]
    most = max(entry.cell.in_flight for entry in found)
    speeds: dict[str, list[float]] = {}
    for entry in found:
        if entry.cell.in_flight == most:
            speeds.setdefault(entry.target, []).append(entry.measured.request_throughput)
    return min((median(each), name) for name, each in speeds.items())


def open_cells(
    options: argparse.Namespace, rounds: list[report.Round], notes: list[str]
) -> list[report.Cell]:
    """Return the open loops to measure, the lowest rates first; note the capacity that shares refer to."""
    cells = []
    for prompt in options.prompt_tokens:
        for tokens in options.tokens:
            like = report.Cell(
                stream=True,
                in_flight=options.most_in_flight,
                answer_tokens=tokens,
                prompt_tokens=prompt,
            )
            like = replace(like, workload=options.workload)
            rates = list(options.rates)
            if options.shares:
                most, target = capacity(rounds, like)
                rates += [share * most for share in options.shares]
                shares = ", ".join(f"{share:g} is {share * most:.4g}/s" for share in options.shares)
                notes.append(
                    f"capacity, {prompt} + {tokens} tokens: {most:.4g} requests/s, the slowest's ({target}); {shares}"
                )
            cells += [replace(like, rate=rate) for rate in sorted(rates)]
    return cells


def load_of(cell: report.Cell, options: argparse.Namespace, seed: int) -> Load:
    """Return the load of a cell."""
    vocabulary = SHAPES[options.shape].vocabulary
    load = Load(
        cell.in_flight,
        options.requests,
        cell.prompt_tokens,
        cell.answer_tokens,
        cell.stream,
        vocabulary,
        seed,
    )
    return replace(
        load, seconds=options.seconds, rate=cell.rate, workload=cell.workload, turns=options.turns
    )


def measure(target: Target, load: Load) -> tuple[Measurement, dict[str, float]]:
    """Return the measurement of a load and the CPU seconds that each role used for it."""
    before, mine = target.cpu(), resource.getrusage(resource.RUSAGE_SELF)
    with first_in_line():
        measured = target.measure(load)
    after, now = target.cpu(), resource.getrusage(resource.RUSAGE_SELF)
    used = {role: after[role] - before.get(role, 0.0) for role in after}
    used["load"] = now.ru_utime + now.ru_stime - mine.ru_utime - mine.ru_stime
    return measured, used


def run_cell(
    targets: list[Target], cell: report.Cell, options: argparse.Namespace
) -> list[report.Round]:
    """Measure one cell: a warm-up of each target, then rounds that begin with another target each time."""
    for target in targets:
        # In open loop, in_flight is only an upper bound, too large for a warm-up.
        flying = min(cell.in_flight, 32) if cell.rate else cell.in_flight
        say(f"{cell.title}: warm-up of {target.name}")
        target.measure(
            replace(
                load_of(cell, options, seed=0),
                in_flight=flying,
                requests=flying,
                seconds=0.0,
                rate=0.0,
            )
        )
    rounds = []
    for number in range(options.rounds):
        first = number % len(targets)
        for target in targets[first:] + targets[:first]:
            say(
                f"{cell.title}: {target.name}, round {number + 1} of {options.rounds}, {options.seconds:g} s"
            )
            # vLLM spins for 1 s after its last request.
            time.sleep(options.settle)
            measured, used = measure(target, load_of(cell, options, seed=number + 1))
            rounds.append(report.Round(cell, target.name, number, measured, used))
    order = {target.name: i for i, target in enumerate(targets)}
    return sorted(rounds, key=lambda entry: (order[entry.target], entry.number))


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
    """Return the number of measurements and about how long they take, without the starts."""
    opened = (
        len(options.prompt_tokens)
        * len(options.tokens)
        * (len(options.rates) + len(options.shares))
    )
    count = (len(closed_cells(options)) + opened) * targets * options.rounds
    minutes = count * (options.seconds + options.settle + 1) / 60
    return f"{count} measurements of {options.seconds:g} s: about {minutes:.0f} minutes"


def prepare(options: argparse.Namespace, given: list[str]) -> tuple[Run, Setting]:
    """Return the run with the head of its report, and the setting that all targets share.

    Raises:
        SystemExit: the longest request does not fit into the model's maximum length.
    """
    work = (options.work or Path(tempfile.mkdtemp(prefix="serving_"))).absolute()
    checkpoint = write_checkpoint(SHAPES[options.shape], work / options.shape)
    share = {"gpu_memory_utilization": round(_GPU_MEMORY / len(options.targets), 2)}
    defaults = _CPU if options.device == "cpu" else {**_GPU, **share}
    engine = {
        "model": str(checkpoint),
        "load_format": "dummy",
        **defaults,
        **_LIMITS,
        **options.engine_arguments,
    }
    engine.update(executors.asked(options.executor, engine))
    if options.workload == "multi-turn":
        engine.setdefault("enable_prefix_caching", True)
    for cell in closed_cells(options):
        if most_tokens(load_of(cell, options, 0)) > engine["max_model_len"]:
            raise SystemExit(
                f"{cell.title}: longer than max_model_len {engine['max_model_len']}; use --engine-arguments"
            )
    variables = _CPU_VARIABLES if options.device == "cpu" else {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    setting = Setting(
        environment=options.environment.absolute(),
        triton_root=options.triton_root.absolute(),
        model_repository=options.model_repository.absolute(),
        arguments=engine,
        variables=variables,
        work=work,
        instances=options.instances,
    )
    described = machine.describe(
        machine.versions_of(setting.environment), setting.triton_root, commit=options.commit
    )
    command = f"python3 benchmarks/serving.py {shlex.join(given)}"
    notes = [
        f"command: `{command}`",
        f"engine arguments: `{json.dumps({**engine, 'model': options.shape})}`",
    ]
    with first_in_line() as allowed:
        ahead = (
            "runs before the servers (SCHED_RR)"
            if allowed
            else "has no priority, which takes root: its gaps may be bursts"
        )
    notes += [
        f"environment of all targets: `{json.dumps(variables)}`",
        f"the load generator {ahead}",
    ]
    return Run(options, command, described, notes), setting


def main(arguments: list[str] | None = None) -> int:
    """Start the targets, measure every cell, and write the report after each cell."""
    given = sys.argv[1:] if arguments is None else arguments
    options = parse(given, __doc__)
    exit_on_sigterm()
    run, setting = prepare(options, given)
    targets = [TARGETS[name](setting) for name in options.targets]
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
    sys.exit(main())
