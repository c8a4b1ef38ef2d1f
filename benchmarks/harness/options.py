"""The options of ``serving.py``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from harness import executors, results, workload
from harness.shapes import SHAPES
from harness.targets import TARGETS

_USUAL = ["engine", "openai", "triton"]


def parse(arguments: list[str], description: str | None) -> argparse.Namespace:
    """Return the options.

    Raises:
        SystemExit: the arguments are wrong, or do not fit together. The message says why.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _add_servers(parser)
    _add_loads(parser)
    results.add_options(parser, Path("benchmarks/results/serving"))
    options = parser.parse_args(arguments)
    if "port" in options.targets and "triton" not in options.targets:
        parser.error("port is the OpenAI port of triton's server: --targets triton port")
    # A share is a part of the capacity, which the closed loops of this run measure.
    if options.shares and not (options.in_flight and "stream" in options.modes):
        parser.error("--shares needs a closed loop of streams: --in-flight 128 --modes stream")
    if (options.shares or options.rates) and options.workload == "multi-turn":
        # A turn can only be sent when the answer before it is complete.
        parser.error("--rates and --shares have no multi-turn conversations: use --in-flight")
    return options


def add_server(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what a server is made of, and where its logs go."""
    add = parser.add_argument
    add(
        "--environment",
        type=Path,
        required=True,
        metavar="DIR",
        help="unpacked environment: bin/python has vLLM",
    )
    add("--triton-root", type=Path, default=Path("/opt/tritonserver"), metavar="DIR")
    add("--model-repository", type=Path, default=Path("model_repository"), metavar="DIR")
    add(
        "--work",
        type=Path,
        metavar="DIR",
        help="logs and checkpoint; default a new temporary directory",
    )


def _add_servers(parser: argparse.ArgumentParser) -> None:
    """Add the options of the targets: which ones, their model, and their engine arguments."""
    add_server(parser)
    add = parser.add_argument
    add(
        "--targets",
        nargs="+",
        choices=TARGETS,
        default=_USUAL,
        metavar="TARGET",
        help=f"default: {' '.join(_USUAL)}; port: the OpenAI port of triton's server",
    )
    add("--shape", choices=sorted(SHAPES), default="tiny-opt", help="of the model")
    add(
        "--device",
        choices=("cpu", "gpu"),
        default="cpu",
        help="chooses the default engine arguments",
    )
    add(
        "--engine-arguments",
        type=json.loads,
        default={},
        metavar="JSON",
        help="added to the defaults",
    )
    add(
        "--executor",
        choices=executors.CHOICES,
        default="uni",
        help="of all targets (default uni, mp with several workers); `default`: each target's own",
    )
    add(
        "--instances",
        type=int,
        default=1,
        metavar="N",
        help="front ends over one engine, of Triton's model and of vLLM's server (default 1)",
    )


def _add_loads(parser: argparse.ArgumentParser) -> None:
    """Add the options of the loads that each target gets, and of their number and length."""
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="measurements of each load and target (default 3)")
    add(
        "--seconds",
        type=float,
        default=60,
        help="window in which requests start (default %(default)s); it waits for the last answers",
    )
    add("--requests", type=int, default=1_000_000, help="most requests in a window")
    add(
        "--settle",
        type=float,
        default=1.3,
        # vLLM spins for 1 s after its last request, and would take a core from the next target.
        help="seconds of rest before each measurement (default %(default)s)",
    )
    add("--in-flight", type=int, nargs="*", default=[1, 8, 32, 128], help="clients, closed loop")
    add("--tokens", type=int, nargs="+", default=[64], help="in an answer (default 64)")
    add("--prompt-tokens", type=int, nargs="+", default=[32], help="in a prompt (default 32)")
    add("--modes", nargs="+", choices=("whole", "stream"), default=["whole", "stream"])
    add(
        "--workload",
        choices=workload.KINDS,
        default="fixed",
        help="fixed lengths; mixed: log-normal around them; multi-turn: conversations of --turns, "
        "with the prefix cache",
    )
    add("--turns", type=int, default=4, help="turns of a multi-turn conversation")
    add(
        "--rates",
        type=float,
        nargs="*",
        default=[],
        metavar="R",
        help="open loop: Poisson arrivals, requests/s",
    )
    add(
        "--shares",
        type=float,
        nargs="*",
        default=[],
        metavar="S",
        help="open loop: rates as shares of the capacity, which is the requests/s of the slowest "
        "target with the most in flight",
    )
    add(
        "--most-in-flight",
        type=int,
        default=512,
        metavar="N",
        help="open loop: most requests at a time; later ones wait for a connection",
    )
