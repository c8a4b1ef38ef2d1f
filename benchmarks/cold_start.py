"""Measure how long built model repositories take from launch to ready and to the first answer, phase by phase.

    python3 benchmarks/cold_start.py archive=REPOSITORY parts=REPOSITORY --triton-root ROOT

A case is a name and a model repository. Build the repository with `gen_vllm_env.sh --model-repository`, and choose
`--layout`, `--warm` and `vllm_engine_args.json`. Cases take turns.

Each of the `--first-starts` has an empty home, as in a new container. Its files are read from the disk, or from memory with
`--keep-page-cache`. Later starts find vLLM's caches in the home. The table goes to a new file next to `--out`, and a row to
`runs.md` in that folder.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from harness import machine, phases
from harness.grpc_client import GrpcConnection, TritonGrpcClient
from harness.load import Request
from harness.metrics import Answer
from harness.processes import exit_on_sigterm
from harness.servers import Setting, StartFailedError
from harness.start_report import Report, Start, phase_table, table
from harness.targets import TritonTarget, run

if TYPE_CHECKING:
    from collections.abc import Iterable


class BuiltTriton(TritonTarget):
    """A server for an existing model repository, which is served as it is."""

    def prepare(self) -> Path:
        """Return the repository."""
        return self.setting.model_repository


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options; ``cases`` maps names to repositories."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("cases", nargs="+", type=_case, metavar="NAME=REPOSITORY", help="with the model vllm in it")
    add("--triton-root", type=Path, default=Path("/opt/tritonserver"), metavar="DIR")
    add("--first-starts", type=int, default=3, help="of each case, with an empty home (default 3)")
    add("--starts", type=int, default=3, help="of each case, that come later (default 3)")
    add(
        "--keep-page-cache",
        action="store_true",
        help="first starts find in memory what the starts before have read",
    )
    add(
        "--out",
        type=Path,
        default=Path("benchmarks/results/cold_start"),
        metavar="PATH",
        help="time and commit are added to it",
    )
    add(
        "--work", type=Path, metavar="DIR", help="homes and logs; default a new temporary directory"
    )
    add("--commit", default="", help="for a copy without git history")
    options = parser.parse_args(arguments)
    options.cases = dict(options.cases)
    return options


def _case(text: str) -> tuple[str, Path]:
    name, found, repository = text.partition("=")
    if not found or not (Path(repository) / "vllm" / "config.pbtxt").is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=REPOSITORY with a model vllm in it")
    return name, Path(repository).absolute()


def versions_of(repository: Path) -> dict[str, str]:
    """Return the versions in a built model's manifest; an empty mapping for a model without a manifest."""
    manifest = repository / "vllm" / "vllm_env.json"
    if not manifest.is_file():
        return {}
    content = json.loads(manifest.read_text("utf-8"))
    return {**content["versions"], "vllm": content["vllm"]["version"]}


def drop_page_cache(places: Iterable[Path]) -> None:
    """Make the kernel drop the files below ``places`` from its page cache; this needs no privilege."""
    os.sync()  # only written-back pages can be dropped
    for place in places:
        for file in filter(Path.is_file, place.rglob("*")):
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fresh_home(folder: Path) -> None:
    """Make an empty home."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


async def ask(port: int) -> None:
    """Send a request for one token."""
    connection = await GrpcConnection.open(port)
    try:
        request = Request("The capital of France is", answer_tokens=1, stream=False)
        await TritonGrpcClient(connection, BuiltTriton.model).ask(
            request, Answer(time.perf_counter())
        )
    finally:
        connection.close()


def start_once(case: str, number: int, setting: Setting, *, first: bool) -> Start:
    """Start the server, ask for one token, and stop it."""
    server = BuiltTriton(setting)
    server.log = setting.work / f"{case}-{number}.log"
    if first:
        fresh_home(Path(setting.variables["HOME"]))
    os.sync()  # otherwise this start would wait for gigabytes that the previous one has extracted
    launched, began = datetime.now(), time.monotonic()  # noqa: DTZ005 - compared with a log without zones
    try:
        ready = server.start()
        run(ask(server.grpc))
        first_token = time.monotonic() - began
    finally:
        server.stop()
    log = server.log.read_text(encoding="utf-8", errors="replace")
    return Start(case, number, first, ready, first_token, phases.parse(log, launched))


def start(case: str, number: int, setting: Setting, report: Report, *, first: bool) -> Start:
    """Start once. If the start fails, note it and start once again.

    tritonserver 24.10 sometimes hangs or aborts in its own start, before it loads the model (env/vllm_env/serve/server.py).
    """
    try:
        return start_once(case, number, setting, first=first)
    except StartFailedError as error:
        report.notes.append(
            f"{case}, start {number + 1}: repeated, because {str(error).partition(';')[0]}"
        )
        log = setting.work / f"{case}-{number}.log"
        log.rename(log.with_suffix(".failed.log"))
        return start_once(case, number, setting, first=first)


def start_all(options: argparse.Namespace, work: Path, report: Report) -> None:
    """Start the cases in turns, first starts before later ones; write the report after each turn."""
    total = options.first_starts + options.starts
    for number in range(total):
        first = number < options.first_starts
        for case, repository in options.cases.items():
            home = work / f"home-{case}"
            if number == 0:
                fresh_home(home)
            if first and not options.keep_page_cache:
                drop_page_cache([repository, options.triton_root])
            variables = {
                "HOME": str(home),
                "XDG_CACHE_HOME": str(home / ".cache"),
                "PYTHONDONTWRITEBYTECODE": "",  # the server may write bytecode, whatever this shell has set
            }
            setting = Setting(
                environment=Path(),
                triton_root=options.triton_root.absolute(),
                model_repository=repository,
                arguments={},
                variables=variables,
                work=work,
            )
            print(f"{case}: start {number + 1} of {total}", file=sys.stderr, flush=True)
            report.starts.append(start(case, number, setting, report, first=first))
            print(
                f"{case}: ready after {report.starts[-1].ready_s:.1f} s",
                file=sys.stderr,
                flush=True,
            )
        report.write()


def main(arguments: list[str] | None = None) -> int:
    """Start the cases and write the report."""
    given = sys.argv[1:] if arguments is None else arguments
    options = parse(given)
    exit_on_sigterm()
    work = (options.work or Path(tempfile.mkdtemp(prefix="cold_start_"))).absolute()
    versions = next(filter(None, map(versions_of, options.cases.values())), {})
    described = machine.describe(versions, options.triton_root, commit=options.commit)
    command = f"python3 benchmarks/cold_start.py {shlex.join(given)}"
    page_cache = (
        "kept"
        if options.keep_page_cache
        else "dropped for the files of the repository and of Triton"
    )
    report = Report(
        options.out,
        described,
        command,
        [f"command: `{command}`", f"page cache before first starts: {page_cache}"],
    )
    start_all(options, work, report)
    print(table(report.starts), phase_table(report.starts), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
