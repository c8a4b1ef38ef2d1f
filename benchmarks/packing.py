"""Compare this project's packing with conda-pack's, on the same prefix.

    python3 benchmarks/packing.py --prefix ~/.cache/vllm_env/prefixes/KEY/env --rounds 5 --cores 2

Both pack the same files in turn. Files that prune.py leaves out are missing for both, so they do not count as better
compression. The figures are wall time, processor time, size, and peak memory of the packing process with its workers. One
more is the time in which libarchive unpacks the result on one core, as Triton does at a start.
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
from dataclasses import asdict, dataclass
from pathlib import Path

from harness import machine, results
from harness.report import shown

ROOT = Path(__file__).resolve().parent.parent
OURS, CONDA_PACK = "vllm-env", "conda-pack"
_CODE = {
    OURS: (
        "import runpy, sys; sys.argv[1:] = [{prefix!r}, {target!r}]; runpy.run_module('vllm_env.layout', run_name='__main__')"
    ),
    CONDA_PACK: (
        "import conda_pack; conda_pack.pack(prefix={prefix!r}, output={target!r}, n_threads={threads}, ignore_missing_files=True)"
    ),
}
_COLUMNS = {  # field of a run -> its heading and unit
    "wall": ("wall s", 1.0),
    "processor": ("processor s", 1.0),
    "size": ("MB", 1e6),
    "memory": ("peak memory MB", 1e6),
    "unpack": ("unpack s", 1.0),
}


@dataclass(frozen=True)
class Run:
    """One packing: wall and processor time (s), size (bytes), peak memory (bytes), time to unpack (s)."""

    packer: str
    wall: float
    processor: float
    size: int
    memory: int
    unpack: float


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--prefix", type=Path, required=True, metavar="DIR", help="a finished conda prefix")
    add("--rounds", type=int, default=3, help="interleaved rounds (default: 3)")
    add("--cores", type=int, default=2, help="to pack with, threads of conda-pack too (default: 2)")
    add("--triton-root", type=Path, default=ROOT / ".triton", metavar="DIR", help="for its version")
    add(
        "--work",
        type=Path,
        metavar="DIR",
        help="for archives; default the folder for temporary files",
    )
    add("--commit", default="", help="for a copy without git history")
    add(
        "--out",
        type=Path,
        default=ROOT / "benchmarks/results/packing",
        metavar="PATH",
        help="time and commit are added to it",
    )
    options = parser.parse_args(arguments)
    options.prefix = options.prefix.expanduser().resolve()
    usable = len(os.sched_getaffinity(0))
    if options.cores > usable:
        parser.error(f"--cores {options.cores}: this machine has {usable}; give fewer")
    return options


def pack_once(packer: str, prefix: Path, cores: int, folder: Path) -> Run:
    """Pack in a process of its own; then unpack with the system's libarchive."""
    target = folder / f"{packer}.tar.gz"
    code = f"import os; os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[:cores]}); "
    code += _CODE[packer].format(prefix=str(prefix), target=str(target), threads=cores)
    code += "; from resource import *; print(sum(getrusage(w).ru_maxrss for w in (RUSAGE_SELF, RUSAGE_CHILDREN)))"
    os.sync()  # vllm-env ends with fsync(), which would also wait for data of the previous run
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "env")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    )
    wall = time.monotonic() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = Run(
        packer=packer,
        wall=wall,
        processor=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        size=target.stat().st_size,
        # ru_maxrss is in KiB on Linux.
        memory=int(done.stdout.split()[-1]) * 1024,
        unpack=unpack(target, folder),
    )
    target.unlink()
    return run


def unpack(archive: Path, folder: Path) -> float:
    """Return the seconds that libarchive needs to unpack an archive."""
    place = folder / "unpacked"
    place.mkdir()
    os.sync()
    code = f"import os, libarchive; os.chdir({str(place)!r}); libarchive.extract_file({str(archive)!r})"
    began = time.monotonic()
    # The C locale of a server's process cannot represent every name. With C.UTF-8, libarchive keeps the bytes, as in Triton.
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        env={**os.environ, "LC_ALL": "C.UTF-8"},
    )
    seconds = time.monotonic() - began
    shutil.rmtree(place)
    return seconds


def table(runs: list[Run]) -> str:
    """Return the medians with minimum and maximum, and the ratios of the medians within this run."""
    heads = [head for head, _ in _COLUMNS.values()]
    rows = [f"| packer | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    medians: dict[str, list[float]] = {}
    for packer in (CONDA_PACK, OURS):
        columns = [
            [getattr(r, name) / by for r in runs if r.packer == packer]
            for name, (_, by) in _COLUMNS.items()
        ]
        medians[packer] = [statistics.median(values) for values in columns]
        rows.append(f"| {packer} | {' | '.join(shown(values, 1) for values in columns)} |")
    ratios = [
        ours / theirs for ours, theirs in zip(medians[OURS], medians[CONDA_PACK], strict=True)
    ]
    rows.append("| ratio | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")
    return "\n".join(rows)


def main(arguments: list[str]) -> None:
    """Pack in rounds and write the report."""
    options = parse(arguments)
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="vllm_env_packing_", dir=options.work) as folder:
        for number in range(options.rounds):
            for packer in (CONDA_PACK, OURS):
                runs.append(pack_once(packer, options.prefix, options.cores, Path(folder)))
                print(f"round {number + 1}: {runs[-1]}", file=sys.stderr, flush=True)
    here = machine.describe(
        machine.versions_of(options.prefix), options.triton_root, commit=options.commit
    )
    command = f"python3 benchmarks/packing.py {shlex.join(arguments)}"
    out = results.take(options.out, here.commit, command)
    head = [
        *here.lines(),
        f"- command: `{command}`",
    ]
    title = f"# Packing one prefix of {machine.tree_size(options.prefix) / 1e9:.2f} GB with {options.cores} threads"
    text = "\n\n".join([title, "\n".join(head), table(runs)])
    out.with_name(f"{out.name}.md").write_text(f"{text}\n", "utf-8")
    out.with_name(f"{out.name}.json").write_text(
        json.dumps([asdict(run) for run in runs], indent=1), "utf-8"
    )
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
