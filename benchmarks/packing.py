"""Compare this project's packing with conda-pack's, on the same prefix.

    python3 benchmarks/packing.py --prefix ~/.cache/vllm_env/prefixes/KEY/env --rounds 5 --cores 2

Both pack the same files in turn. Files that prune.py leaves out are missing for both, so they do
not count as better compression. The figures are wall time, processor time, size, and peak memory of
the packing process with its workers. One more is the time in which libarchive unpacks the result on
one core, as Triton does at a start.
"""

from __future__ import annotations

import argparse
import os
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from harness import machine, results
from harness.report import markdown, median_and_range

ROOT = Path(__file__).resolve().parent.parent
OURS = "vllm-env"
CONDA_PACK = "conda-pack"
# The program that packs, for {prefix}, {target} and {threads}.
_CODE = {
    OURS: (
        "import runpy, sys; sys.argv[1:] = [{prefix!r}, {target!r}]; "
        "runpy.run_module('vllm_env.layout', run_name='__main__')"
    ),
    # conda-pack refuses a prefix in which files of its packages are missing, as after pruning.
    CONDA_PACK: (
        "import conda_pack; conda_pack.pack(prefix={prefix!r}, output={target!r}, "
        "n_threads={threads}, ignore_missing_files=True)"
    ),
}
# Both run on the first {threads} cores, because our packing has no option for their number. At the
# end they print the peak memory of the process and of its workers.
_PROGRAM = """\
import os, resource
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:{threads}])
{pack}
who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
print(sum(resource.getrusage(each).ru_maxrss for each in who))
"""
# Field of a run -> its heading and unit.
_COLUMNS = {
    "wall": ("wall s", 1.0),
    "processor": ("processor s", 1.0),
    "size": ("MB", 1e6),
    "memory": ("peak memory MB", 1e6),
    "unpack": ("unpack s", 1.0),
}


@dataclass(frozen=True)
class Run:
    """One packing: times in seconds, size of the archive and peak memory in bytes."""

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
    add("--rounds", type=int, default=3, help="times that each one packs (default: 3)")
    add("--cores", type=int, default=2, help="cores that both may use (default: 2)")
    add(
        "--triton-root",
        type=Path,
        default=ROOT / ".triton",
        metavar="DIR",
        help="its version is reported",
    )
    add(
        "--work",
        type=Path,
        metavar="DIR",
        help="folder for archives; default the one for temporary files",
    )
    results.add_options(parser, ROOT / "benchmarks/results/packing")
    options = parser.parse_args(arguments)
    options.prefix = options.prefix.expanduser().resolve()
    # A container may have fewer cores than its machine.
    usable = len(os.sched_getaffinity(0))
    if options.cores > usable:
        parser.error(f"--cores {options.cores}: this machine has {usable}; give fewer")
    return options


def pack_once(packer: str, prefix: Path, cores: int, folder: Path) -> Run:
    """Pack in a process of its own, unpack, and delete both; return the figures.

    Args:
        packer: a key of ``_CODE``.
        prefix: the conda prefix.
        cores: number of cores to pack with.
        folder: for the archive and its contents.
    """
    target = folder / f"{packer}.tar.gz"
    pack = _CODE[packer].format(prefix=str(prefix), target=str(target), threads=cores)
    command = [sys.executable, "-c", _PROGRAM.format(threads=cores, pack=pack)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "env")}
    # vllm-env ends with fsync(), which would also wait for the data of the previous run.
    os.sync()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    beginning = time.monotonic()
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    wall = time.monotonic() - beginning
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = Run(
        packer=packer,
        wall=wall,
        processor=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        size=target.stat().st_size,
        # The last line of the output, in KiB (getrusage(2)).
        memory=int(done.stdout.split()[-1]) * 1024,
        unpack=unpack(target, folder),
    )
    target.unlink()
    return run


def unpack(archive: Path, folder: Path) -> float:
    """Return the seconds that libarchive needs to unpack an archive into a folder below ``folder``.

    What it has unpacked is deleted.
    """
    place = folder / "unpacked"
    place.mkdir()
    code = f"import libarchive; libarchive.extract_file({str(archive.absolute())!r})"
    command = [sys.executable, "-c", code]
    # libarchive converts names for the locale, and the C locale cannot represent every name. With
    # C.UTF-8 it keeps their bytes, as it does in Triton.
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    # Otherwise the kernel might write the archive's data meanwhile.
    os.sync()
    beginning = time.monotonic()
    subprocess.run(command, check=True, capture_output=True, env=environment, cwd=place)
    seconds = time.monotonic() - beginning
    shutil.rmtree(place)
    return seconds


def table(runs: list[Run]) -> str:
    """Return a table with three rows: conda-pack, ours, and the ratio of their medians.

    The figures are medians over the rounds, with their ranges.
    """
    heads = ["packer"]
    theirs = [CONDA_PACK]
    ours = [OURS]
    ratios = ["ratio"]
    for name, (head, unit) in _COLUMNS.items():
        values: dict[str, list[float]] = defaultdict(list)
        for run in runs:
            values[run.packer].append(getattr(run, name) / unit)
        heads.append(head)
        theirs.append(median_and_range(values[CONDA_PACK], 1))
        ours.append(median_and_range(values[OURS], 1))
        ratios.append(f"{median(values[OURS]) / median(values[CONDA_PACK]):.2f}")
    return markdown(heads, [theirs, ours, ratios])


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
    out = results.reserve(options.out, here.commit, command)
    head = [*here.lines(), f"- command: `{command}`"]
    size = machine.tree_size(options.prefix) / 1e9
    title = f"# Packing one prefix of {size:.2f} GB with {options.cores} threads"
    parts = [title, "\n".join(head), table(runs)]
    results.write_text(out, parts)
    results.write_json(out, [asdict(run) for run in runs])
    print("\n\n".join(parts))


if __name__ == "__main__":
    main(sys.argv[1:])
