"""Measure the memory of the server's processes over many requests; it grows if requests leak.

    python3 benchmarks/soak.py --environment ENV --triton-root ROOT

It sends `--requests` short requests, half of them streamed, and records the resident memory of each
process. The growth counts from the first tenth on: by then pools and caches have reached their
size. The exit status is 1 if the stub has grown by more than `--limit-mb`.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import time
from pathlib import Path

from harness import machine, results
from harness.options import add_server
from harness.report import markdown
from harness.servers import CPU_VARIABLES, Setting
from harness.shapes import SHAPES, write_checkpoint
from harness.targets import TritonTarget
from harness.workload import Load

# A tiny model without real weights: the run measures the servers' memory, not the model's.
_ENGINE = {"load_format": "dummy", "dtype": "float32", "enforce_eager": True, "max_model_len": 512}
_SHAPE = "tiny-opt"
# The requests so far, and the resident bytes by role.
Sample = tuple[int, dict[str, float]]


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_server(parser)
    add = parser.add_argument
    add("--requests", type=int, default=100_000, help="number of them (default: %(default)s)")
    add("--in-flight", type=int, default=64, help="requests at a time (default: %(default)s)")
    add("--tokens", type=int, default=4, help="tokens in an answer (default: %(default)s)")
    add("--steps", type=int, default=20, help="measurements of the memory (default: %(default)s)")
    add("--limit-mb", type=float, default=30, help="for the stub's growth (default: %(default)s)")
    add(
        "--out",
        type=Path,
        default=Path("benchmarks/results/soak"),
        metavar="PATH",
        help=results.OUT_HELP,
    )
    return parser.parse_args(arguments)


def soak(server: TritonTarget, options: argparse.Namespace) -> list[Sample]:
    """Send the requests; return a sample after each step."""
    count = options.requests // options.steps
    samples = []
    for step in range(options.steps):
        load = Load(
            in_flight=options.in_flight,
            requests=count,
            prompt_tokens=16,
            answer_tokens=options.tokens,
            # In every other step.
            stream=bool(step % 2),
            vocabulary=SHAPES[_SHAPE].vocabulary,
            seed=step,
        )
        server.measure(load)
        time.sleep(0.5)
        samples.append(((step + 1) * count, server.resident()))
        print(samples[-1], file=sys.stderr, flush=True)
    return samples


def table(samples: list[Sample]) -> str:
    """Return the resident memory in MB after each step, by role."""
    roles = sorted(samples[-1][1])
    rows = []
    for count, used in samples:
        rows.append([f"{count:,}", *(f"{used.get(role, 0) / 1e6:.1f}" for role in roles)])
    return markdown(["requests", *(f"{role} MB" for role in roles)], rows)


def main(arguments: list[str]) -> int:
    """Run the load, write the report and return 1 if the stub has grown too much."""
    options = parse(arguments)
    work = options.work or Path(tempfile.mkdtemp(prefix="soak_"))
    checkpoint = write_checkpoint(SHAPES[_SHAPE], work / _SHAPE)
    setting = Setting(
        environment=options.environment.absolute(),
        triton_root=options.triton_root.absolute(),
        model_repository=options.model_repository.absolute(),
        arguments={"model": str(checkpoint), **_ENGINE},
        variables=CPU_VARIABLES,
        work=work,
    )
    server = TritonTarget(setting)
    conditions = machine.describe(machine.versions_of(setting.environment), setting.triton_root)
    command = f"python3 benchmarks/soak.py {shlex.join(arguments)}"
    head = [*conditions.lines(), f"- command: `{command}`"]
    try:
        server.start()
        samples = soak(server, options)
    finally:
        server.stop()
    # The first tenth of the requests warms the model up.
    _, settled = samples[max(0, options.steps // 10 - 1)]
    requests, last = samples[-1]
    growth = (last["stub"] - settled["stub"]) / 1e6
    verdict = f"The stub grew by {growth:.1f} MB over {requests:,} requests."
    stem = results.take(options.out, conditions.commit, command)
    title = "# Memory over many requests"
    results.write_text(stem, [title, "\n".join(head), verdict, table(samples)])
    print(verdict)
    return 0 if growth <= options.limit_mb else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
