"""Measure the memory of the server's processes over very many requests; a leak per request makes it grow.

    python3 benchmarks/soak.py --environment ENV --triton-root ROOT

It sends `--requests` short requests, half of them streamed, and records the resident memory of each process. The growth
counts from the first tenth on: by then pools and caches have reached their size. The exit status is 1 if the stub has
grown by more than `--limit-mb`.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import time
from pathlib import Path

from harness import machine, results
from harness.servers import Setting
from harness.shapes import SHAPES, write_checkpoint
from harness.targets import TritonTarget
from harness.workload import Load

# A tiny model without real weights: the run measures the servers' memory, not the model's.
_ENGINE = {"load_format": "dummy", "dtype": "float32", "enforce_eager": True, "max_model_len": 512}
_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--environment", type=Path, required=True, metavar="DIR")
    add("--triton-root", type=Path, default=Path("/opt/tritonserver"), metavar="DIR")
    add("--model-repository", type=Path, default=Path("model_repository"), metavar="DIR")
    add("--requests", type=int, default=100_000)
    add("--in-flight", type=int, default=64)
    add("--tokens", type=int, default=4, help="an answer")
    add("--steps", type=int, default=20, help="times that memory is noted")
    add("--limit-mb", type=float, default=30)
    add(
        "--out",
        type=Path,
        default=Path("benchmarks/results/soak"),
        metavar="PATH",
        help="time and commit are added to it",
    )
    add("--work", type=Path, metavar="DIR")
    return parser.parse_args(arguments)


def soak(
    server: TritonTarget, options: argparse.Namespace, vocabulary: int
) -> list[tuple[int, dict[str, float]]]:
    """Return the requests so far and the resident bytes by role, after each step."""
    each = options.requests // options.steps
    seen = []
    for step in range(options.steps):
        load = Load(
            options.in_flight, each, 16, options.tokens, bool(step % 2), vocabulary, seed=step
        )
        server.measure(load)
        time.sleep(0.5)
        seen.append(((step + 1) * each, server.resident()))
        print(seen[-1], file=sys.stderr, flush=True)
    return seen


def write(
    out: Path, head: list[str], seen: list[tuple[int, dict[str, float]]], growth: float
) -> None:
    """Write the table."""
    roles = sorted(seen[-1][1])
    lines = [
        f"| requests | {' | '.join(f'{role} MB' for role in roles)} |",
        "|---" * (len(roles) + 1) + "|",
    ]
    lines += [
        f"| {count:,} | {' | '.join(f'{used.get(role, 0) / 1e6:.1f}' for role in roles)} |"
        for count, used in seen
    ]
    text = [
        "# Memory over many requests",
        "\n".join(head),
        f"The stub grew by {growth:.1f} MB.",
        "\n".join(lines),
    ]
    out.with_name(f"{out.name}.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Run the load, write the report and return 1 if the stub has grown too much."""
    given = sys.argv[1:] if arguments is None else arguments
    options = parse(given)
    work = options.work or Path(tempfile.mkdtemp(prefix="soak_"))
    shape = SHAPES["tiny-opt"]
    setting = Setting(
        environment=options.environment.absolute(),
        triton_root=options.triton_root.absolute(),
        model_repository=options.model_repository.absolute(),
        arguments={"model": str(write_checkpoint(shape, work / shape.name)), **_ENGINE},
        variables=_VARIABLES,
        work=work,
    )
    server = TritonTarget(setting)
    described = machine.describe(machine.versions_of(setting.environment), setting.triton_root)
    command = f"python3 benchmarks/soak.py {shlex.join(given)}"
    head = [*described.lines(), f"- command: `{command}`"]
    try:
        server.start()
        seen = soak(server, options, shape.vocabulary)
    finally:
        server.stop()
    # the first tenth of the requests warms the model up
    settled = seen[max(0, options.steps // 10 - 1)][1]["stub"]
    growth = (seen[-1][1]["stub"] - settled) / 1e6
    write(results.take(options.out, described.commit, command), head, seen, growth)
    print(f"the stub grew by {growth:.1f} MB over {seen[-1][0]:,} requests")
    return 0 if growth <= options.limit_mb else 1


if __name__ == "__main__":
    sys.exit(main())
