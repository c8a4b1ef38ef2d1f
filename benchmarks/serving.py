"""Serving speed of one model behind the engine alone, vLLM's own server and this project's model under tritonserver.

All targets run at the same time with the same engine arguments, and are loaded one after the other in rounds, so that
whatever else happens on the machine happens to all of them:

    python3 benchmarks/serving.py --environment ENV --triton-root ROOT

`ENV` is an unpacked environment (`bin/python` has vLLM); it serves all targets. Needs tritonclient[grpc] in the Python
that runs this. Writes a table, a figure and every round's figures to `--out`.
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import signal
import sys
import tempfile
import time
from pathlib import Path

from harness import executors, machine, report
from harness.load import Load, Measurement
from harness.servers import Setting
from harness.shapes import SHAPES, write_checkpoint
from harness.targets import Target, make_targets

_CPU = {"dtype": "float32", "enforce_eager": True, "max_model_len": 2048}
# By default vLLM pins its CPU worker to core 0 and spins there; on two cores whatever else the scheduler puts on that
# core then stands still for seconds, with every target. Left to the scheduler, the same load is up to six times as fast.
_CPU_VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
_GPU = {"dtype": "float16", "max_model_len": 512, "gpu_memory_utilization": 0.31}
# vLLM chooses other limits for its server than for an engine; here all targets have the same.
_LIMITS = {"max_num_seqs": 512, "max_num_batched_tokens": 8192}


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--environment", type=Path, required=True, metavar="DIR", help="unpacked environment: bin/python has vLLM")
    add("--triton-root", type=Path, default=Path("/opt/tritonserver"), metavar="DIR")
    add("--model-repository", type=Path, default=Path("model_repository"), metavar="DIR")
    add("--shape", choices=sorted(SHAPES), default="tiny-opt")
    add("--device", choices=("cpu", "gpu"), default="cpu", help="chooses the default engine arguments")
    add("--engine-arguments", type=json.loads, default={}, metavar="JSON", help="added to the defaults")
    add(
        "--executor", choices=executors.CHOICES, default="uni",
        help="of all targets (default uni, mp with several workers); default: each target's own",
    )  # fmt: skip
    add("--variables", type=json.loads, default={}, metavar="JSON", help="environment of all targets")
    add("--settle", type=float, default=1.3, help="seconds of rest before a measurement: vLLM spins 1 s after the last")
    add("--rounds", type=int, default=5)
    add("--in-flight", type=int, nargs="+", default=[1, 8, 32, 128])
    add("--requests", type=int, default=200, help="a cell; less for few in flight, more for many (default 200)")
    add("--waves", type=int, default=4, help="requests a cell at least, in multiples of those in flight")
    add("--tokens", type=int, nargs="+", default=[64], help="tokens an answer, one table each")
    add("--prompt-tokens", type=int, nargs="+", default=[32])
    add("--modes", nargs="+", choices=("whole", "stream"), default=["whole", "stream"])
    add("--targets", nargs="+", default=["engine", "openai", "triton"], help="also: triton-http")
    add("--instances", type=int, default=1, metavar="N", help="front ends of Triton's model over its one engine (default 1)")
    add("--out", type=Path, default=Path("benchmarks/results/serving"), metavar="PATH", help="without suffix")
    add("--work", type=Path, metavar="DIR", help="logs and checkpoint; default a new temporary directory")
    add("--commit", default="", help="for a copy without git history")
    add("--note", action="append", default=[], metavar="TEXT", help="a line for the head of the report (repeatable)")
    return parser.parse_args(arguments)


def cells(options: argparse.Namespace) -> list[report.Cell]:
    """Return the loads to measure, light ones first."""
    return [
        report.Cell(mode == "stream", in_flight, tokens, prompt)
        for prompt in options.prompt_tokens
        for tokens in options.tokens
        for in_flight in options.in_flight
        for mode in options.modes
    ]


def load_of(cell: report.Cell, options: argparse.Namespace, seed: int) -> Load:
    """Return the load of a cell: a few requests where one at a time takes long, some waves where many fly."""
    count = max(min(options.requests, 16 * cell.in_flight), options.waves * cell.in_flight)
    vocabulary = SHAPES[options.shape].vocabulary
    return Load(cell.in_flight, count, cell.prompt_tokens, cell.answer_tokens, cell.stream, vocabulary, seed)


def measure(target: Target, load: Load) -> tuple[Measurement, dict[str, float]]:
    """Return what a load gives and the CPU seconds each role used for it."""
    before, mine = target.cpu(), resource.getrusage(resource.RUSAGE_SELF)
    measured = target.measure(load)
    after, now = target.cpu(), resource.getrusage(resource.RUSAGE_SELF)
    used = {role: after[role] - before.get(role, 0.0) for role in after}
    used["load"] = now.ru_utime + now.ru_stime - mine.ru_utime - mine.ru_stime
    return measured, used


def run_cell(targets: list[Target], cell: report.Cell, options: argparse.Namespace) -> list[report.Round]:
    """Measure one cell: a warm-up of each target, then rounds, each beginning with another target."""
    once = argparse.Namespace(**{**vars(options), "requests": cell.in_flight, "waves": 1})
    for target in targets:
        target.measure(load_of(cell, once, seed=0))
    rounds = []
    for number in range(options.rounds):
        first = number % len(targets)
        for target in targets[first:] + targets[:first]:
            load = load_of(cell, options, seed=number + 1)
            time.sleep(options.settle)
            measured, used = measure(target, load)
            rounds.append(report.Round(cell, target.name, number, measured, used))
    order = {target.name: i for i, target in enumerate(targets)}
    return sorted(rounds, key=lambda entry: (order[entry.target], entry.number))


def main(arguments: list[str] | None = None) -> int:
    """Start the targets, measure every cell, write the report after each."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers are stopped, as after an interrupt
    work = options.work or Path(tempfile.mkdtemp(prefix="serving_"))
    checkpoint = write_checkpoint(SHAPES[options.shape], work / options.shape)
    defaults = _CPU if options.device == "cpu" else _GPU
    engine = {"model": str(checkpoint), "load_format": "dummy", **defaults, **_LIMITS, **options.engine_arguments}
    engine.update(executors.asked(options.executor, engine))
    variables = _CPU_VARIABLES if options.device == "cpu" else {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    variables = {**variables, **options.variables}
    setting = Setting(
        options.environment.absolute(), options.triton_root.absolute(), options.model_repository.absolute(),
        engine, variables, work, options.instances,
    )  # fmt: skip
    targets = make_targets(options.targets, setting)
    described = machine.describe(setting.environment, setting.triton_root, commit=options.commit)
    command = f"python3 benchmarks/serving.py {shlex.join(sys.argv[1:] if arguments is None else arguments)}"
    notes = [f"command: `{command}`", f"engine arguments: `{json.dumps({**engine, 'model': options.shape})}`"]
    notes += [f"environment of all targets: `{json.dumps(variables)}`", *options.note]
    title = f"Serving, {options.shape} shape, dummy weights"
    rounds: list[report.Round] = []
    try:
        for target in targets:
            took = target.start()
            notes.append(f"{target.name} ready after {took:.1f} s, executor: {target.executor()}")
            print(notes[-1], file=sys.stderr, flush=True)
        for cell in cells(options):
            rounds += run_cell(targets, cell, options)
            report.write(options.out, title, described, notes, rounds)
            print(f"\n{cell.title}\n{report.table(report.by_cell(rounds)[cell])}", flush=True)
    finally:
        for target in targets:
            target.stop()
        print(f"logs: {work}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
