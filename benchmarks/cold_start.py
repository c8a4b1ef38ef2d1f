"""Launch to ready and to the first token, phase by phase, of this project's repository and of what one would make first.

    .tools/venv-*/bin/python benchmarks/cold_start.py --repository BUILT --triton-root ROOT

Cases: `archive`, the repository as `gen_vllm_env.sh` built it; `directory`, the same environment unpacked; `parts`, the one
that `--parts` names, built with `--layout parts`, whose first start unpacks it into the home; `baseline`,
what a user would make without this project: the same wheels installed into a conda prefix, packed by conda-pack, both
with their defaults (no bytecode, nothing left out), and a model.py that imports vLLM at its top; `baseline-pip`, the same
installed by pip, which compiles what it installs; `archive-warm` and `directory-warm`, with the caches that
`gen_vllm_env.sh --warm` keeps beside the model. Cases alternate; each of the `--first-starts` finds an empty home, as in a new
container, and a page cache that was dropped (`--keep-page-cache` leaves it); the later ones find what vLLM has cached there.
Writes a table and a figure beside `--out`.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from datetime import datetime
from pathlib import Path

from harness import machine, page_cache, phases
from harness.metrics import Measurement
from harness.processes import exit_on_sigterm
from harness.progress import step
from harness.servers import Setting, StartFailedError, set_parameter
from harness.shapes import SHAPES, write_checkpoint
from harness.start_report import Report, Start, phase_table, table
from harness.targets import TritonTarget
from harness.workload import Load

_CPU = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512}
# The stand-in's blocks are so small that vLLM takes 10 s to make those for half of an H200's memory
_GPU = {"dtype": "float16", "max_model_len": 512, "kv_cache_memory_bytes": 1 << 30}
ARCHIVE = "vllm_env.tar.gz"
_LAYOUTS = ("archive", "directory")
_CASES = ("baseline", "baseline-pip", *_LAYOUTS, "parts", "archive-warm", "directory-warm")


class PreparedTriton(TritonTarget):
    """A server for a model store that exists already."""

    def __init__(self, setting: Setting, store: Path) -> None:
        super().__init__(setting)
        self._store = store

    def prepare(self) -> Path:
        """Return the store."""
        return self._store


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--repository", type=Path, default=Path("model_repository"), metavar="DIR", help="built by gen_vllm_env.sh")
    add("--baseline-prefix", type=Path, metavar="DIR", help="made if it is not there, which takes the packager's Python")
    add("--directory", type=Path, metavar="DIR", help="unpacked environment; default: the archive, unpacked")
    add("--parts", type=Path, metavar="DIR", help="model repository built with --layout parts, for the case of that name")
    add("--triton-root", type=Path, default=Path("/opt/tritonserver"), metavar="DIR")
    add("--shape", choices=sorted(SHAPES), default="tiny-opt")
    add("--device", choices=("cpu", "gpu"), default="cpu")
    add("--engine-arguments", type=json.loads, default={}, metavar="JSON", help="added to the defaults")
    add("--first-starts", type=int, default=3, help="of each case, with an empty home (default 3)")
    add("--starts", type=int, default=3, help="of each case, that come later (default 3)")
    add("--keep-page-cache", action="store_true", help="first starts find in memory what the starts before have read")
    add("--cases", nargs="+", choices=_CASES, default=["baseline", *_LAYOUTS], metavar="CASE", help=", ".join(_CASES))
    add("--out", type=Path, default=Path("benchmarks/results/cold_start"), metavar="PATH", help="time and commit are added to it")
    add(
        "--work",
        type=Path,
        metavar="DIR",
        help="default a new temporary directory; needs thrice the environment's size",
    )
    add("--commit", default="")
    add("--note", action="append", default=[], metavar="TEXT", help="a line for the head of the report (repeatable)")
    options = parser.parse_args(arguments)
    if "parts" in options.cases and not options.parts:
        parser.error("the case parts needs --parts DIR")
    return options


def prepare(case: str, options: argparse.Namespace, work: Path, engine: dict[str, object]) -> Path:
    """Make the model store of a case; return it."""
    model = work / f"store-{case}" / "vllm"
    archive = (options.parts if case == "parts" else options.repository).absolute() / "vllm" / ARCHIVE
    shutil.rmtree(model, ignore_errors=True)
    shutil.copytree(archive.parent, model, ignore=shutil.ignore_patterns(ARCHIVE, "vllm_env", "vllm_cache", "__pycache__"))
    (model / "vllm_engine_args.json").write_text(json.dumps(engine), encoding="utf-8")
    layout, _, warmed = case.partition("-")
    if layout in ("archive", "parts"):
        shutil.copy2(archive, model / ARCHIVE)
        environment = f"$$TRITON_MODEL_DIRECTORY/{ARCHIVE}"
    elif layout == "directory":
        environment = str(options.directory.absolute() if options.directory else unpacked(archive, work))
    else:
        shutil.rmtree(model / "1")
        (model / "1").mkdir()
        shutil.copy(Path(__file__).with_name("harness") / "baseline_model.py", model / "1" / "model.py")
        (model / "vllm_env.json").unlink(missing_ok=True)
        environment = str(conda_pack(baseline_prefix_of(case, options, work), work / f"{case}.tar.gz"))
    set_parameter(model / "config.pbtxt", "EXECUTION_ENV_PATH", environment)
    if warmed:
        fill_caches(model, options, work)
    return model.parent


def fill_caches(model: Path, options: argparse.Namespace, work: Path) -> None:
    """Load the model once with a home of its own and keep the caches that vLLM fills, as `gen_vllm_env.sh --warm` does."""
    filled = work / f"filled-{model.parent.name}"
    filled.mkdir(parents=True)
    home = fresh_home(work / f"home-filling-{model.parent.name}")
    variables = {**engine_variables(options.device), **home, "TRITON_VLLM_WARM": str(filled)}
    setting = Setting(Path(), options.triton_root.absolute(), model.parent, {}, variables, work)
    server = PreparedTriton(setting, model.parent)
    try:
        server.start()
    finally:
        server.stop()
    filled.rename(model / "vllm_cache")


def fresh_home(folder: Path) -> dict[str, str]:
    """Make an empty home, and return the variables with which vLLM, inductor and Triton keep their caches in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / ".cache")}


def engine_variables(device: str) -> dict[str, str]:
    """Return what vLLM needs on a device."""
    return {"VLLM_USE_FLASHINFER_SAMPLER": "0"} if device == "gpu" else {"VLLM_CPU_KVCACHE_SPACE": "1"}


@functools.cache
def unpacked(archive: Path, work: Path) -> Path:
    """Return the archive's environment, unpacked once in a run."""
    destination = work / "unpacked"
    shutil.rmtree(destination, ignore_errors=True)
    with tarfile.open(archive) as tar:
        tar.extractall(destination, filter="fully_trusted")
    return destination


def baseline_prefix_of(case: str, options: argparse.Namespace, work: Path) -> Path:
    """Return a baseline's prefix, made if it is not there.

    Raises:
        SystemExit: it is one that the packager has made, or its wheels are compiled and should not be, or the reverse.
    """
    from harness import baseline_prefix

    by_pip = case == "baseline-pip"
    prefix: Path = ((not by_pip and options.baseline_prefix) or work / f"{case}-prefix").absolute()
    if not prefix.exists():
        with step(f"making {prefix.name}"):
            model = options.repository.absolute() / "vllm"
            baseline_prefix.make(prefix, model, options.triton_root.absolute(), by_pip=by_pip)
    found = baseline_prefix.inspect(prefix)
    if found.hooked or bool(found.compiled) != by_pip:
        raise SystemExit(f"{prefix} is no {case}: it has {found.compiled} compiled modules of vLLM, hook: {found.hooked}")
    return prefix


def baseline_notes(case: str, options: argparse.Namespace, work: Path) -> list[str]:
    """Return the lines of the report that say what a baseline is, from what was packed."""
    from harness import baseline_prefix

    found = baseline_prefix.inspect(baseline_prefix_of(case, options, work))
    packed = (work / f"{case}.tar.gz").stat().st_size
    installer = "pip install" if case == "baseline-pip" else "uv pip install"
    made = (
        f"{case}: the repository's locked wheels put into a conda prefix by `{installer}` and packed by `conda-pack`, "
        "both with their defaults; `benchmarks/harness/baseline_model.py` imports vLLM at its top"
    )
    holds = (
        f"{case}'s prefix: {found.distributions} distributions, {found.size / 1e9:.2f} GB, nothing left out, "
        f"{found.compiled} of vLLM's modules compiled and all of the standard library's, as from conda-forge; "
        f"packed {packed / 1e9:.2f} GB"
    )
    return [made, holds]


def conda_pack(prefix: Path, archive: Path) -> Path:
    """Pack a prefix with conda-pack as it comes."""
    program = str(Path(sys.executable).with_name("conda-pack"))
    command = [program, "--quiet", "--force", "--prefix", str(prefix), "--output", str(archive)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONWARNINGS": "ignore"})
    return archive


def start_once(case: str, number: int, store: Path, setting: Setting, vocabulary: int, *, first: bool) -> Start:
    """Start the server, ask for one token, stop it."""
    server = PreparedTriton(setting, store)
    os.sync()  # the gigabytes that the start before has extracted are not this one's to write
    launched, began = datetime.now(), time.monotonic()  # noqa: DTZ005 - compared with a log without zones
    try:
        ready = server.start()
        ask(server, Load(1, 1, 32, 1, stream=not case.startswith("baseline"), vocabulary=vocabulary, seed=number))
        first_token = time.monotonic() - began
    finally:
        server.stop()
    log = server.log.read_text(encoding="utf-8", errors="replace")
    server.log.rename(server.log.with_name(f"{case}-{number}.log"))
    return Start(case, number, first, ready, first_token, phases.parse(log, launched))


def start(case: str, number: int, store: Path, setting: Setting, vocabulary: int, notes: list[str], *, first: bool) -> Start:
    """Start once; a start that fails is repeated once, and noted.

    tritonserver 24.10 now and then hangs or aborts in its own start, before the model has any part in it
    (env/vllm_env/serve/server.py).
    """
    try:
        return start_once(case, number, store, setting, vocabulary, first=first)
    except StartFailedError as error:
        notes.append(f"{case}, start {number + 1}: repeated, because {str(error).partition(';')[0]}")
        print(notes[-1], file=sys.stderr, flush=True)
        (setting.work / f"{PreparedTriton.name}.log").rename(setting.work / f"{case}-{number}-failed.log")
        if first:
            fresh_home(Path(setting.variables["HOME"]))
        return start_once(case, number, store, setting, vocabulary, first=first)


def ask(server: TritonTarget, load: Load) -> Measurement:
    """Put a load on the server."""
    return server.measure(load)


def environment_python(options: argparse.Namespace, work: Path) -> Path:
    """Return a prefix that has the Python whose versions the report names."""
    places = (options.directory, work / "unpacked", options.baseline_prefix, *work.glob("baseline*-prefix"), Path("/usr"))
    return next(place for place in places if place and place.exists())


def start_all(options: argparse.Namespace, stores: dict[str, Path], work: Path, engine: dict[str, object], run: Report) -> None:
    """Start the cases in turns, first starts before later ones, and write the report after each turn."""
    homes: dict[str, dict[str, str]] = {}
    for number in range(options.first_starts + options.starts):
        first = number < options.first_starts
        for case, store in stores.items():
            if first or case not in homes:
                homes[case] = fresh_home(work / f"home-{case}")
            if first and not options.keep_page_cache:
                run.note(f"page cache before first starts: {page_cache.drop([store, *filter(None, [options.directory])])}")
            # a server may write bytecode, as it may in a container, whatever this shell is set to
            variables = {**homes[case], **engine_variables(options.device), "PYTHONDONTWRITEBYTECODE": ""}
            setting = Setting(Path(), options.triton_root.absolute(), options.repository, engine, variables, work)
            with step(f"{case}: start {number + 1} of {options.first_starts + options.starts}"):
                done = start(case, number, store, setting, SHAPES[options.shape].vocabulary, run.notes, first=first)
            run.starts.append(done)
            print(f"{case}: ready after {done.ready_s:.1f} s", file=sys.stderr, flush=True)
        run.write()


def main(arguments: list[str] | None = None) -> int:
    """Prepare the cases, start them, write the report."""
    given = sys.argv[1:] if arguments is None else arguments
    options = parse(given)
    exit_on_sigterm()
    work = (options.work or Path(tempfile.mkdtemp(prefix="cold_start_"))).absolute()
    shape = SHAPES[options.shape]
    engine: dict[str, object] = {"model": str(write_checkpoint(shape, work / shape.name)), "load_format": "dummy"}
    engine.update(_GPU if options.device == "gpu" else _CPU)
    engine.update(options.engine_arguments)
    stores = {}
    for case in options.cases:
        with step(f"preparing {case}"):
            stores[case] = prepare(case, options, work, engine)
    described = machine.describe(environment_python(options, work), options.triton_root, commit=options.commit)
    command = f"python3 benchmarks/cold_start.py {shlex.join(given)}"
    run = Report(options.out, described, command, [f"command: `{command}`", *options.note])
    for case in options.cases:
        if case.startswith("baseline"):
            run.notes += baseline_notes(case, options, work)
    start_all(options, stores, work, engine, run)
    print(table(run.starts), phase_table(run.starts), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
