"""Packing: the tool's own pack stage against conda-pack, on the same prefix.

    python benchmarks/packing.py --prefix ~/.cache/vllm_env/prefixes/KEY/env --rounds 3 --cores 1 2 --shares 0.25 0.5 1

Both pack the very same files in turn, so that what is left out of an environment (prune.py; it is left out before either
packs) is not counted as better compression. Measured: wall and processor time, size, peak memory of the packing process
and its workers, and how long libarchive takes to unpack the result on one core, which is what Triton does at a start.
With more than one number of cores or share of the prefix, a table shows how both packers scale.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks")]

from harness import machine, results, svg  # noqa: E402

OURS, CONDA_PACK = "vllm-env", "conda-pack"
_CODE = {
    OURS: (
        "import runpy, sys; sys.argv[1:] = [{prefix!r}, {target!r}]; runpy.run_module('vllm_env.layout', run_name='__main__')"
    ),
    CONDA_PACK: (
        "import conda_pack; conda_pack.pack(prefix={prefix!r}, output={target!r}, n_threads={threads}, ignore_missing_files=True)"
    ),
}


@dataclass(frozen=True)
class Cell:
    """A prefix, the bytes in it, and the number of cores to pack it with."""

    prefix: Path
    content: int
    cores: int

    @property
    def title(self) -> str:
        """Return the row's or the table's name."""
        return f"{self.cores} {'core' if self.cores == 1 else 'cores'}, {self.content / 1e9:.2f} GB"


@dataclass(frozen=True)
class Run:
    """One packing: seconds of wall and processor time, size in bytes, peak memory in bytes, seconds to unpack."""

    cell: Cell
    packer: str
    wall: float
    processor: float
    size: int
    memory: int
    unpack: float


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", type=Path, required=True, help="a finished conda prefix")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default: 3)")
    parser.add_argument(
        "--scaling-rounds",
        type=int,
        default=2,
        help="rounds of all but the whole prefix with the most cores (default: 2)",
    )
    parser.add_argument("--cores", type=int, nargs="+", default=[2], help="threads of conda-pack, too (default: 2)")
    parser.add_argument(
        "--shares", type=float, nargs="+", default=[1.0], metavar="SHARE", help="of the prefix, by size (default: 1)"
    )
    parser.add_argument("--triton-root", type=Path, default=ROOT / ".triton", metavar="DIR", help="for its version")
    parser.add_argument("--work", type=Path, metavar="DIR", help="for archives; default the folder for temporary files")
    parser.add_argument("--note", action="append", default=[], metavar="TEXT", help="a line for the report's head")
    parser.add_argument("--commit", default="", help="for a copy without git history")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/packing", help="result files, without suffix")
    return parser.parse_args(arguments)


def cells(options: argparse.Namespace, folder: Path) -> list[Cell]:
    """Return what to measure, the whole prefix with the most cores last.

    Raises:
        SystemExit: this process may not use that many cores.
    """
    usable = len(os.sched_getaffinity(0))
    if max(options.cores) > usable:
        raise SystemExit(f"--cores {max(options.cores)}: this machine has {usable}; give fewer")
    prefix = options.prefix.expanduser().resolve()
    prefixes = [prefix if share >= 1 else part_of(prefix, share, folder / f"part-{share}") for share in sorted(options.shares)]
    return [Cell(place, machine.tree_size(place), cores) for place in prefixes for cores in sorted(options.cores)]


def part_of(prefix: Path, share: float, target: Path) -> Path:
    """Return a prefix of hard links with the interpreter and as many packages as make up a share of the bytes."""
    packages = next(prefix.glob("lib/python3.*/site-packages"))
    sizes = {entry: machine.tree_size(entry) if entry.is_dir() else entry.stat().st_size for entry in packages.iterdir()}
    room = int(share * machine.tree_size(prefix)) - (machine.tree_size(prefix) - sum(sizes.values()))
    left_out = set()
    for entry, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0].name)):
        if size > room:
            left_out.add(entry.name)
        else:
            room -= size

    def ignored(place: str, names: list[str]) -> list[str]:
        return [name for name in names if name in left_out] if place == str(packages) else []

    shutil.copytree(prefix, target, symlinks=True, copy_function=os.link, ignore=ignored)
    return target


def pack_once(packer: str, cell: Cell, folder: Path, *, unpacking: bool) -> Run:
    """Pack in a process of its own, then unpack with the system's libarchive if that is asked for."""
    target = folder / f"{packer}.tar.gz"
    cpus = sorted(os.sched_getaffinity(0))[: cell.cores]
    code = f"import os; os.sched_setaffinity(0, {cpus}); "
    code += _CODE[packer].format(prefix=str(cell.prefix), target=str(target), threads=cell.cores)
    os.sync()  # vllm-env ends with fsync(), which would also wait for what the run before has left to be written
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    measured = f"{code}; from resource import *; print(sum(getrusage(w).ru_maxrss for w in (RUSAGE_SELF, RUSAGE_CHILDREN)))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "env")}
    done = subprocess.run([sys.executable, "-c", measured], env=environment, check=True, capture_output=True, text=True)
    wall = time.monotonic() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    run = Run(
        cell,
        packer,
        wall,
        processor,
        target.stat().st_size,
        int(done.stdout.split()[-1]) * 1024,
        unpack(target, folder) if unpacking else 0.0,
    )
    target.unlink()
    return run


def unpack(archive: Path, folder: Path) -> float:
    """Return the seconds that libarchive takes to unpack an archive."""
    place = folder / "unpacked"
    place.mkdir()
    os.sync()
    code = f"import os, libarchive; os.chdir({str(place)!r}); libarchive.extract_file({str(archive)!r})"
    began = time.monotonic()
    # the C locale of a server's process cannot hold every name; as Triton, libarchive then keeps the bytes
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env={**os.environ, "LC_ALL": "C.UTF-8"})
    seconds = time.monotonic() - began
    shutil.rmtree(place)
    return seconds


def scaling_table(runs: list[Run]) -> str:
    """Return a row for each number of cores and size: both packers' seconds and what that is in MB/s, and ratios."""
    rows = [
        f"| cores, unpacked size | {CONDA_PACK} s | {OURS} s | ratio | {CONDA_PACK} MB/s | {OURS} MB/s | ratio of sizes |",
        "|---|---|---|---|---|---|---|",
    ]
    for cell in dict.fromkeys(run.cell for run in runs):
        theirs, ours = ([r for r in runs if r.cell == cell and r.packer == p] for p in (CONDA_PACK, OURS))
        walls = _median(theirs, "wall"), _median(ours, "wall")
        speeds = [cell.content / 1e6 / wall for wall in walls]
        rows.append(
            f"| {cell.title} | {walls[0]:.1f} | {walls[1]:.1f} | {walls[1] / walls[0]:.2f} "
            f"| {speeds[0]:.0f} | {speeds[1]:.0f} | {_median(ours, 'size') / _median(theirs, 'size'):.2f} |"
        )
    return "\n".join(rows)


def table(runs: list[Run]) -> str:
    """Return medians, and the ratios of medians within this run."""
    rows = ["| packer | wall s (min-max) | processor s | MB | peak memory MB | unpack s |", "|---|---|---|---|---|---|"]
    for packer in (CONDA_PACK, OURS):
        mine = [r for r in runs if r.packer == packer]
        walls = [r.wall for r in mine]
        rows.append(
            f"| {packer} | {statistics.median(walls):.1f} ({min(walls):.1f}-{max(walls):.1f}) "
            f"| {_median(mine, 'processor'):.1f} | {_median(mine, 'size') / 1e6:.0f} "
            f"| {_median(mine, 'memory') / 1e6:.0f} | {_median(mine, 'unpack'):.1f} |"
        )
    ours, theirs = ([r for r in runs if r.packer == p] for p in (OURS, CONDA_PACK))
    ratios = [_median(ours, f) / _median(theirs, f) for f in ("wall", "processor", "size", "memory", "unpack")]
    rows.append("| ratio | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")
    return "\n".join(rows)


def _median(runs: list[Run], field: str) -> float:
    return statistics.median(getattr(r, field) for r in runs)


def figure(runs: list[Run]) -> str:
    """Return the medians as bars."""
    fields = (("wall", "s", 1.0), ("size", "MB", 1e6), ("unpack", "s", 1.0), ("memory", "MB", 1e6))
    panels = [
        svg.Panel(name, unit, [""], {p: [_median([r for r in runs if r.packer == p], name) / by] for p in (CONDA_PACK, OURS)})
        for name, unit, by in fields
    ]
    return svg.draw("Packing the same prefix", panels)


def report(options: argparse.Namespace, arguments: list[str], here: machine.Machine, runs: list[Run]) -> str:
    """Return the report: the whole prefix with the most cores, and how that scales if there is more than one cell."""
    measured = list(dict.fromkeys(run.cell for run in runs))
    head = [
        *here.lines(),
        f"- command: `python benchmarks/packing.py {shlex.join(arguments)}`",
        *(f"- {note}" for note in options.note),
    ]
    last = [run for run in runs if run.cell == measured[-1]]
    parts = ["# Packing the same prefix", "\n".join(head), f"## {measured[-1].title}", table(last)]
    if len(measured) > 1:
        parts += ["## By cores and size", scaling_table(runs)]
    return "\n\n".join([*parts, f"![time and size]({options.out.name}.svg)"]) + "\n"


def main(arguments: list[str]) -> None:
    """Pack every cell in rounds, write the report."""
    options = parse(arguments)
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="vllm_env_packing_", dir=options.work) as name:
        folder = Path(name)
        measured = cells(options, folder)
        for cell in measured:
            whole = cell == measured[-1]
            for number in range(options.rounds if whole else options.scaling_rounds):
                for packer in (CONDA_PACK, OURS):
                    runs.append(pack_once(packer, cell, folder, unpacking=whole))
                    print(f"{cell.title}, round {number + 1}: {runs[-1]}", file=sys.stderr, flush=True)
    here = machine.describe(options.prefix.expanduser().resolve(), options.triton_root, commit=options.commit)
    options.out = results.take(options.out, here.commit, f"python3 benchmarks/packing.py {shlex.join(arguments)}")
    text = report(options, arguments, here, runs)
    options.out.with_name(f"{options.out.name}.md").write_text(text, "utf-8")
    drawn = figure([run for run in runs if run.cell == runs[-1].cell])
    options.out.with_name(f"{options.out.name}.svg").write_text(drawn, "utf-8")
    rows = [{**vars(r), "cell": {"content": r.cell.content, "cores": r.cell.cores}} for r in runs]
    options.out.with_name(f"{options.out.name}.json").write_text(json.dumps(rows, indent=1), "utf-8")
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
