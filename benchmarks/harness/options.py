"""The options of ``serving.py``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from harness import executors, workload
from harness.shapes import SHAPES
from harness.targets import TARGETS


def parse(arguments: list[str], description: str | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _add_servers(parser)
    _add_loads(parser)
    add = parser.add_argument
    add(
        "--out",
        type=Path,
        default=Path("benchmarks/results/serving"),
        metavar="PATH",
        help="time and commit are added to it",
    )
    add(
        "--work",
        type=Path,
        metavar="DIR",
        help="logs and checkpoint; default a new temporary directory",
    )
    add("--commit", default="", help="for a copy without git history")
    options = parser.parse_args(arguments)
    if options.shares and not (options.in_flight and "stream" in options.modes):
        parser.error("--shares needs streams in flight, whose requests/s it is a share of")
    if (options.shares or options.rates) and options.workload == "multi-turn":
        parser.error(
            "an open loop of multi-turn conversations is not defined here: a turn waits for the answer before it"
        )
    return options


def _add_servers(parser: argparse.ArgumentParser) -> None:
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
        "--targets",
        nargs="+",
        choices=TARGETS,
        default=list(TARGETS),
        metavar="TARGET",
        help="default: " + " ".join(TARGETS),
    )
    add("--shape", choices=sorted(SHAPES), default="tiny-opt")
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
    helped = "of all targets (default uni, mp with several workers); `default`: each target's own"
    add("--executor", choices=executors.CHOICES, default="uni", help=helped)
    add(
        "--instances",
        type=int,
        default=1,
        metavar="N",
        help="front ends of Triton's model over its one engine (default 1)",
    )


def _add_loads(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rounds", type=int, default=3)
    add(
        "--seconds",
        type=float,
        default=60,
        help="window in which requests start (default 60); the last ones are waited for",
    )
    add("--requests", type=int, default=1_000_000, help="at most, in a window")
    add(
        "--settle",
        type=float,
        default=1.3,
        help="seconds of rest before a measurement: vLLM spins 1 s after the last",
    )
    add("--in-flight", type=int, nargs="*", default=[1, 8, 32, 128], help="of the closed loop")
    add("--tokens", type=int, nargs="+", default=[64], help="tokens an answer, one table each")
    add("--prompt-tokens", type=int, nargs="+", default=[32])
    add("--modes", nargs="+", choices=("whole", "stream"), default=["whole", "stream"])
    helped = "fixed lengths; mixed: log-normal around them; multi-turn: --turns of them, answered from the prefix cache"
    add("--workload", choices=workload.KINDS, default="fixed", help=helped)
    add("--turns", type=int, default=4, help="of a multi-turn conversation")
    add(
        "--rates",
        type=float,
        nargs="*",
        default=[],
        metavar="R",
        help="open loop: Poisson arrivals, requests/s",
    )
    helped = "open loop: rates as shares of capacity, which is the slowest target's requests/s with the most in flight"
    add("--shares", type=float, nargs="*", default=[], metavar="S", help=helped)
    add(
        "--most-in-flight",
        type=int,
        default=512,
        metavar="N",
        help="of the open loop: later requests wait for a connection",
    )
