"""Measure how long the first two commands of README.md take, for several commits in turn.

    python3 benchmarks/first_minute.py 1f45eb2 HEAD --rounds 5

In each round, each commit gets an empty home. The steps are, in this order:

    empty      a build in a fresh clone, with an empty cache
    again      the same build, which has nothing to do
    first      the first start of the built model
    vllm       a start of vLLM's own server, with the same engine arguments and environment
    later      another start of the built model
    wheels     a build in a fresh clone; the cache has only the fetched files and their bytecode
    filled     a build in a fresh clone, with the whole cache

Nothing else may run on the machine: a build counts as waiting for a download while bytes arrive
and less than a quarter of one core is busy. The report is written after each round.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from cold_start import BuiltTriton, versions_of
from harness import machine, results
from harness.processes import exit_on_sigterm
from harness.report import markdown, median_and_range
from harness.servers import Setting
from harness.targets import OpenAITarget

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).resolve().parent.parent
BUILDS = ("empty", "again", "wheels", "filled")
STARTS = ("first", "later", "vllm")
_PERIOD_S = 0.2
_IDLE = 0.25  # of one core
_ARRIVES = 100_000  # bytes per second
# Folders of the cache that stay for the build with wheels. uv has a cache of its own, which stays.
_KEPT = {"bytecode", "conda", "wheels"}


@dataclass(frozen=True)
class Measured:
    """A build or a start.

    Attributes:
        commit: its name on the command line.
        step: one of ``BUILDS`` and ``STARTS``.
        seconds: until the command ended, or the server was ready.
        processor_s: processor time of a build's processes. 0 for a start.
        waited_s: how long a build only waited for a download.
        received: bytes that the machine received during a build.
        stages: the seconds of each stage of a build.
    """

    commit: str
    step: str
    seconds: float
    processor_s: float = 0.0
    waited_s: float = 0.0
    received: int = 0
    stages: dict[str, float] | None = None


class Watch(threading.Thread):
    """Samples the machine until it is ended: busy cores and received bytes.

    Attributes:
        waited_s: seconds in which the machine only waited for a download.
        received: bytes that it has received.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._end = threading.Event()
        self.waited_s = 0.0
        self.received = 0

    def run(self) -> None:
        """Add up the received bytes, and the periods in which bytes arrive and nothing computes."""
        before = _sample()
        # wait() returns False after each period, and True when ``end`` is called.
        while not self._end.wait(_PERIOD_S):
            now = _sample()
            seconds, busy_s, received = (b - a for a, b in zip(before, now, strict=True))
            self.received += int(received)
            is_idle = busy_s < _IDLE * seconds
            if is_idle and received > _ARRIVES * seconds:
                self.waited_s += seconds
            before = now

    def end(self) -> None:
        """End it."""
        self._end.set()
        self.join()


def _sample() -> tuple[float, float, float]:
    """Return the time (s), the busy time of all cores (s), and the received bytes.

    All three are totals: only their differences between two samples mean something.
    """
    cores = psutil.cpu_times()
    # The kernel counts guests' time in the time of user and nice, too.
    busy = sum(cores) - cores.idle - cores.iowait - cores.guest - cores.guest_nice
    networks = psutil.net_io_counters(pernic=True)
    received = sum(counters.bytes_recv for name, counters in networks.items() if name != "lo")
    return time.monotonic(), busy, received


def variables_of(home: Path) -> dict[str, str]:
    """Return the variables of a user with a home of their own and no settings."""
    caches = ("XDG_CACHE_HOME", "UV_CACHE_DIR", "PIP_CACHE_DIR")
    left_out = (*caches, "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in left_out and not name.startswith("VLLM_")
    }
    return {**kept, "HOME": str(home)}


def clone(commit: str, folder: Path) -> Path:
    """Return a fresh clone at a commit."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
    subprocess.run(["git", "checkout", "--quiet", commit], cwd=folder, check=True)
    return folder


def build(checkout: Path, home: Path, commit: str, step: str) -> Measured:
    """Run the first command of README.md, and return its figures.

    Args:
        checkout: the clone to run it in; the log goes to a file next to it.
        home: the user's home, which has the cache.
        commit: see ``Measured``.
        step: one of ``BUILDS``.

    Raises:
        CalledProcessError: it failed; its output is on the terminal.
    """
    log = checkout.parent / f"{step}.log"
    watch = Watch()
    watch.start()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.monotonic()
    try:
        with log.open("w", encoding="utf-8") as sink:
            subprocess.run(
                ["./gen_vllm_env.sh"],
                cwd=checkout,
                env=variables_of(home),
                stdout=sink,
                stderr=subprocess.STDOUT,
                check=True,
            )
    except subprocess.CalledProcessError:
        sys.stderr.write(log.read_text("utf-8"))
        raise
    finally:
        watch.end()
    seconds = time.monotonic() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    stages = stages_of(log.read_text("utf-8"))
    return Measured(commit, step, seconds, processor, watch.waited_s, watch.received, stages)


def stages_of(output: str) -> dict[str, float]:
    """Return the seconds of each stage that a build has printed."""
    stages = {}
    for line in output.splitlines():
        # "smoke run    17.2 s  ready after 16 s, 4 answers": the first 21 characters have the name,
        # the number and the unit.
        words = line[:21].rsplit(maxsplit=2)
        if len(words) < 3:
            continue
        name, seconds, unit = words
        if unit == "s" and seconds.replace(".", "", 1).isdigit():
            stages[name] = float(seconds)
    return stages


def environment_of(home: Path) -> Path:
    """Return the environment that the build has left in its cache."""
    cache = home / ".cache" / "vllm_env"
    unpacked = sorted(cache.glob("unpacked/*/bin/python"))
    # A layout that Triton extracts leaves only the prefix.
    found = unpacked or sorted(cache.glob("prefixes/*/env/bin/python"))
    return found[0].parent.parent


def starts(checkout: Path, home: Path, commit: str, work: Path) -> list[Measured]:
    """Start the model, then vLLM's own server, then the model again; return the three starts.

    Args:
        checkout: the clone, which has the built model and Triton.
        home: the home of the user who has built it.
        commit: see ``Measured``.
        work: folder for logs.
    """
    model = checkout / "model_repository" / "vllm"
    arguments = json.loads((model / "vllm_engine_args.json").read_text("utf-8"))
    # The model may be a folder next to this file.
    if (model / arguments["model"]).is_dir():
        arguments["model"] = str(model / arguments["model"])
    setting = Setting(
        environment=environment_of(home),
        arguments=arguments,
        triton_root=checkout / ".triton",
        model_repository=checkout / "model_repository",
        variables={**variables_of(home), "XDG_CACHE_HOME": str(home / ".cache")},
        work=work,
    )
    measured = []
    for step in ("first", "vllm", "later"):
        server = OpenAITarget(setting) if step == "vllm" else BuiltTriton(setting)
        try:
            measured.append(Measured(commit, step, server.start()))
        finally:
            server.stop()
    return measured


def one_round(commit: str, work: Path) -> list[Measured]:
    """Measure all steps of one commit, with a new home; see the module's docstring."""
    home = work / "home"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    first = clone(commit, work / "first")
    measured = [build(first, home, commit, step) for step in ("empty", "again")]
    measured += starts(first, home, commit, work)
    # The build of the step "wheels" finds only these folders in the cache. The one of "filled" also
    # finds what that build has added.
    for folder in (home / ".cache" / "vllm_env").iterdir():
        if folder.is_dir() and folder.name not in _KEPT:
            shutil.rmtree(folder)
    for step in ("wheels", "filled"):
        measured.append(build(clone(commit, work / step), home, commit, step))
    return measured


def tables(measured: Iterable[Measured]) -> list[str]:
    """Return two tables in Markdown, of the builds and of the starts; a row is a step of a commit.

    The figures are medians over the rounds, with their ranges.
    """
    by_row: dict[tuple[str, str], list[Measured]] = defaultdict(list)
    for one in measured:
        by_row[one.step, one.commit].append(one)
    builds, started = [], []
    for step, commit in sorted(by_row, key=lambda row: (BUILDS + STARTS).index(row[0])):
        rounds = by_row[step, commit]
        seconds = median_and_range([one.seconds for one in rounds], 1)
        if step in STARTS:
            started.append((step, commit, seconds))
            continue
        best = min(one.seconds - one.waited_s for one in rounds)
        waited = median_and_range([one.waited_s for one in rounds], 1)
        processor = median_and_range([one.processor_s for one in rounds], 0)
        megabytes = median_and_range([one.received / 1e6 for one in rounds], 0)
        builds.append((step, commit, seconds, f"{best:.1f}", waited, processor, megabytes))
    heads = ("build", "commit", "s", "best without waiting", "waited for downloads, s")
    return [
        markdown((*heads, "processor s", "MB received"), builds),
        markdown(("start", "commit", "s until ready"), started),
    ]


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("commits", nargs="+", metavar="COMMIT", help="of this repository")
    add("--rounds", type=int, default=5, help="default 5")
    results.add_options(parser, Path("benchmarks/results/first_minute"))
    add("--work", type=Path, metavar="DIR", help="clones and homes; default a new temporary folder")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Measure the rounds, and write the report after each; return the exit code 0."""
    options = parse(arguments)
    exit_on_sigterm()
    work = (options.work or Path(tempfile.mkdtemp(prefix="first_minute_"))).absolute()
    command = f"python3 benchmarks/first_minute.py {shlex.join(arguments)}"
    measured: list[Measured] = []
    # The report's path without suffix, once there is a measurement.
    stem = None
    for number in range(options.rounds):
        # Every other round goes the other way round, so that no commit is always the first.
        order = options.commits if number % 2 == 0 else options.commits[::-1]
        for commit in order:
            print(f"round {number + 1} of {options.rounds}: {commit}", file=sys.stderr, flush=True)
            measured += one_round(commit, work / "commit")
        first = work / "commit" / "first"
        versions = versions_of(first / "model_repository")
        conditions = machine.describe(versions, first / ".triton", commit=options.commit)
        # After each round: a run takes an hour, and may be ended.
        stem = stem or results.reserve(options.out, conditions.commit, command)
        results.write_json(stem, [asdict(one) for one in measured])
        text = f"{number + 1} rounds: medians, with the least and the most"
        head = "\n".join([*conditions.lines(), f"- command: `{command}`", f"- {text}"])
        heading = "# The first minute: builds and starts"
        results.write_text(stem, [heading, head, *tables(measured)])
        print(*tables(measured), sep="\n\n", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
