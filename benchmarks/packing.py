"""Packing: the tool's own pack stage against conda-pack, on the same prefix.

    python benchmarks/packing.py --prefix ~/.cache/vllm_env/prefixes/KEY/env --rounds 3

Both pack the very same files in turn, so that what is left out of an environment (prune.py; it is left out before either
packs) is not counted as better compression. Measured: wall and processor time, size, peak memory of the packing process
and its workers, and how long libarchive takes to unpack the result on one core, which is what Triton does at a start.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "env"), str(ROOT / "benchmarks")]

from harness import machine, svg  # noqa: E402

OURS, CONDA_PACK = "vllm-env", "conda-pack"
_CODE = {
    OURS: (
        "from pathlib import Path; from vllm_env.pack import plan_archive, write_archive; "
        "write_archive(plan_archive(Path({prefix!r})), Path({target!r}))"
    ),
    CONDA_PACK: (
        "import conda_pack; conda_pack.pack(prefix={prefix!r}, output={target!r}, n_threads={threads}, "
        "ignore_missing_files=True)"
    ),
}


@dataclass(frozen=True)
class Run:
    """One packing: seconds of wall and processor time, size in bytes, peak memory in bytes, seconds to unpack."""

    packer: str
    wall: float
    processor: float
    size: int
    memory: int
    unpack: float


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", type=Path, required=True, help="a finished conda prefix")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default: 3)")
    parser.add_argument("--threads", type=int, default=2, help="threads of conda-pack (default: 2)")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks/results/packing", help="result files, without suffix"
    )
    return parser.parse_args(arguments)


def pack_once(packer: str, prefix: Path, folder: Path, threads: int) -> Run:
    """Pack in a process of its own, then unpack with the system's libarchive."""
    target = folder / f"{packer}.tar.gz"
    code = _CODE[packer].format(prefix=str(prefix), target=str(target), threads=threads)
    os.sync()  # vllm-env ends with fsync(), which would also wait for what the run before has left to be written
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    measured = (
        f"{code}; from resource import *; print(sum(getrusage(w).ru_maxrss for w in (RUSAGE_SELF, RUSAGE_CHILDREN)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "env")}
    done = subprocess.run([sys.executable, "-c", measured], env=environment, check=True, capture_output=True, text=True)
    wall = time.monotonic() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    run = Run(
        packer, wall, processor, target.stat().st_size, int(done.stdout.split()[-1]) * 1024, unpack(target, folder)
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
    subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, env={**os.environ, "LC_ALL": "C.UTF-8"}
    )
    seconds = time.monotonic() - began
    shutil.rmtree(place)
    return seconds


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
        svg.Panel(
            name, unit, [""], {p: [_median([r for r in runs if r.packer == p], name) / by] for p in (CONDA_PACK, OURS)}
        )
        for name, unit, by in fields
    ]
    return svg.draw("Packing the same prefix", panels)


def left_out(prefix: Path) -> str:
    """Return what prune.py left out of this prefix, as the prefix's own record has it."""
    record = prefix.parent / ".complete"
    if not record.is_file():
        return "not recorded"
    rules = [line.split() for line in record.read_text().splitlines()]
    total = sum(int(size) for _, _, size in rules)
    return f"{total / 1e6:.0f} MB before packing (" + ", ".join(f"{n} {int(s) / 1e6:.0f}" for n, _, s in rules) + ")"


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    prefix = options.prefix.expanduser().resolve()
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="vllm_env_packing_") as folder:
        for number in range(options.rounds):
            for packer in (CONDA_PACK, OURS):
                runs.append(pack_once(packer, prefix, Path(folder), options.threads))
                print(f"round {number + 1}: {runs[-1]}", file=sys.stderr, flush=True)
    here = machine.describe(prefix, ROOT / ".triton")
    text = f"# Packing the same prefix\n\n{chr(10).join(here.lines())}\n- left out of the prefix: {left_out(prefix)}\n"
    text += f"- command: `python benchmarks/packing.py {' '.join(arguments)}`\n\n{table(runs)}\n\n"
    text += f"![time and size]({options.out.name}.svg)\n"
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".md").write_text(text, "utf-8")
    options.out.with_suffix(".svg").write_text(figure(runs), "utf-8")
    options.out.with_suffix(".json").write_text(json.dumps([vars(r) for r in runs], indent=1), "utf-8")
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
