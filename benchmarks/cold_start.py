"""Measure how long a built model takes to be ready and to give its first answer, phase by phase.

    python3 benchmarks/cold_start.py archive=REPOSITORY parts=REPOSITORY --triton-root ROOT

A case is a name and a model repository. Build it with `gen_vllm_env.sh --model-repository`, and
choose `--layout`, `--warm` and `vllm_engine_args.json`. Cases take turns.

With `--environment`, the model uses that unpacked one, and has dummy weights of `--shape`. Then
`--own-server` adds vLLM's own server as a case.

Each of the `--first-starts` has an empty home, as in a new container. Its files are read from the
disk, or from memory with `--keep-page-cache`. Later starts find vLLM's caches in the home. The
table goes to a new file next to `--out`, after each start, and a row to `runs.md` in that folder.
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
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from harness import machine, phases, results
from harness.grpc_client import GrpcConnection, TritonGrpcClient
from harness.matrix_ask import post
from harness.matrix_rows import COMMON_ARGUMENTS
from harness.matrix_serve import CPU_ARGUMENTS, WITHOUT_COMPILER
from harness.matrix_shapes import MATRIX_SHAPES
from harness.processes import exit_on_sigterm
from harness.servers import CPU_VARIABLES, Setting, StartFailedError
from harness.shapes import SHAPES, write_checkpoint
from harness.start_report import Report, Start, phase_table, table
from harness.targets import OpenAITarget, TritonTarget, run
from loadtest.record import Record, Request

if TYPE_CHECKING:
    from collections.abc import Iterable


# The name of the case.
OWN = "vllm-serve"
# The matrix has a small Llama; its other shapes are a name away.
_SHAPES = {**SHAPES, **{f"matrix-{name}": shape for name, shape in MATRIX_SHAPES.items()}}
_PROMPT = "The capital of France is"


class BuiltTriton(TritonTarget):
    """A server for an existing model repository, which is served as it is."""

    def prepare(self) -> Path:
        """Return the repository."""
        return self.setting.model_repository


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options; ``cases`` maps names to repositories, and ``OWN`` to None."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("cases", nargs="*", type=_case, metavar="NAME=REPOSITORY", help="with the model vllm in it")
    add("--triton-root", type=Path, default=Path("/opt/tritonserver"), metavar="DIR")
    add("--first-starts", type=int, default=3, help="with an empty home, of each case (default 3)")
    add("--starts", type=int, default=3, help="later ones, of each case (default 3)")
    add("--rounds", type=int, default=1, help="of first and later starts (default 1)")
    add("--environment", type=Path, metavar="DIR", help="unpacked environment, for --shape")
    add("--shape", choices=sorted(_SHAPES), default="tiny-opt", help="of the model")
    add("--device", choices=("cpu", "gpu"), default="gpu", help="for --environment")
    add(
        "--engine-arguments", type=json.loads, default={}, metavar="JSON", help="with --environment"
    )
    add("--instances", type=int, default=1, help="front ends, with --environment (default 1)")
    add("--own-server", action="store_true", help=f"add the case {OWN}: needs --environment")
    add(
        "--keep-page-cache",
        action="store_true",
        help="first starts find in memory the files that earlier starts have read",
    )
    results.add_options(parser, Path("benchmarks/results/cold_start"))
    add(
        "--work", type=Path, metavar="DIR", help="homes and logs; default a new temporary directory"
    )
    options = parser.parse_args(arguments)
    options.cases = dict(options.cases)
    if options.own_server:
        if not options.environment:
            parser.error("--own-server needs --environment")
        options.cases[OWN] = None
    if not options.cases:
        parser.error("name a case, or --own-server")
    return options


def _case(text: str) -> tuple[str, Path]:
    """Return the name and the repository of a case on the command line."""
    name, _, repository = text.partition("=")
    if not repository or not Path(repository, "vllm", "config.pbtxt").is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=REPOSITORY with a model vllm in it")
    return name, Path(repository).absolute()


def versions_of(repository: Path) -> dict[str, str]:
    """Return the versions in a built model's manifest; {} if the model has none."""
    # A model that gen_vllm_env.sh did not build has no manifest.
    manifest = repository / "vllm" / "vllm_env.json"
    if not manifest.is_file():
        return {}
    content = json.loads(manifest.read_text("utf-8"))
    return {**content["versions"], "vllm": content["vllm"]["version"]}


def drop_page_cache(folders: Iterable[Path]) -> None:
    """Make the kernel drop the files below these folders from its page cache."""
    # Only pages that are written back can be dropped.
    os.sync()
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    # Unlike /proc/sys/vm/drop_caches, this does not need root.
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


async def ask(port: int) -> None:
    """Send a request for one token to the gRPC port, and wait for the answer."""
    connection = await GrpcConnection.open(port)
    client = TritonGrpcClient(connection, BuiltTriton.model)
    request = Request(
        index=0,
        prompt=_PROMPT,
        parameters={"max_tokens": 1, "ignore_eos": True, "temperature": 0},
        stream=False,
    )
    now = time.perf_counter()
    try:
        await client.ask(request, Record(request, due=now, sent=now))
    finally:
        connection.close()


def server_of(case: str, setting: Setting) -> TritonTarget | OpenAITarget:
    """Return the server of a case, not started yet."""
    if case == OWN:
        return OpenAITarget(setting)
    # `setting_of` gives no engine arguments without --environment. The repository is then served as
    # it is.
    return TritonTarget(setting) if setting.arguments else BuiltTriton(setting)


def ask_for_token(server: TritonTarget | OpenAITarget) -> None:
    """Send a request for one token to a started server, and wait for the answer."""
    if isinstance(server, TritonTarget):
        run(ask(server.grpc))
        return
    model = server.setting.arguments["model"]
    body = {"model": model, "prompt": _PROMPT, "max_tokens": 1, "temperature": 0}
    post(f"http://127.0.0.1:{server.port}/v1/completions", body)


def start_once(case: str, number: int, setting: Setting, *, place: int) -> Start:
    """Start the server, ask for one token, and stop it; return the times.

    Args:
        case: the case's name.
        number: number of the start, from 0.
        setting: with the repository, and a home in ``variables``.
        place: number of earlier starts with this home; with 0, the home is emptied.

    Raises:
        StartFailedError: the server does not become ready.
    """
    server = server_of(case, setting)
    server.log = setting.work / f"{case}-{number}.log"
    home = Path(setting.variables["HOME"])
    if place == 0:
        shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True, exist_ok=True)
    # Write back all files now. Otherwise this start would wait for gigabytes that the previous one
    # has extracted.
    os.sync()
    # In local time without a zone, as in the server's log.
    launch = datetime.now()  # noqa: DTZ005
    beginning = time.monotonic()
    try:
        ready = server.start()
        ask_for_token(server)
        first_token = time.monotonic() - beginning
    finally:
        server.stop()
    log = server.log.read_text(encoding="utf-8", errors="replace")
    return Start(case, number, place, ready, first_token, phases.parse(log, launch))


def start(case: str, number: int, setting: Setting, report: Report, *, place: int) -> Start:
    """Start once; see ``start_once``. If it fails, note that in the report and start again."""
    try:
        return start_once(case, number, setting, place=place)
    # tritonserver 24.10 sometimes hangs or aborts in its own start, before it loads the model
    # (env/vllm_env/serve/server.py).
    except StartFailedError as error:
        # Without the second part of the message, which names the log.
        reason = str(error).partition(";")[0]
        report.notes.append(f"{case}, start {number + 1}: repeated, because {reason}")
        log = setting.work / f"{case}-{number}.log"
        log.rename(log.with_suffix(".failed.log"))
        return start_once(case, number, setting, place=place)


def setting_of(
    case: str, repository: Path | None, options: argparse.Namespace, work: Path
) -> Setting:
    """Return the setting of a case, which has a home of its own.

    Without ``--environment``, the setting has no engine arguments and no path of an environment:
    the repository names both. With it, the checkpoint of ``--shape`` is written below ``work``.

    Args:
        case: the case's name.
        repository: the case's model repository; None for ``OWN``.
        options: the command line's options.
        work: folder for homes, logs and checkpoints.
    """
    home = work / f"home-{case}"
    setting = Setting(
        environment=options.environment.absolute() if options.environment else Path(),
        arguments={},
        triton_root=options.triton_root.absolute(),
        model_repository=repository or Path(),
        variables={
            "HOME": str(home),
            "XDG_CACHE_HOME": str(home / ".cache"),
            # The server may write bytecode, whatever this shell has set.
            "PYTHONDONTWRITEBYTECODE": "",
        },
        work=work,
        instances=options.instances,
    )
    if not options.environment:
        return setting
    checkpoint = write_checkpoint(_SHAPES[options.shape], work / options.shape)
    arguments = {
        "model": str(checkpoint),
        **COMMON_ARGUMENTS,
        **(CPU_ARGUMENTS if options.device == "cpu" else {}),
        **options.engine_arguments,
    }
    defaults = {}
    if options.device == "cpu":
        defaults = CPU_VARIABLES
    elif case == OWN:
        # The adapter sets these itself.
        defaults = WITHOUT_COMPILER
    return replace(setting, arguments=arguments, variables={**defaults, **setting.variables})


def places(options: argparse.Namespace) -> list[int]:
    """Return for each start of a case its place: the number of earlier starts with its home."""
    one_round = [0] * options.first_starts + list(range(1, options.starts + 1))
    rounds: int = options.rounds
    return one_round * rounds


def start_all(options: argparse.Namespace, work: Path, report: Report) -> None:
    """Start the cases in turns; in each round, first starts before later ones.

    Args:
        options: the command line's options.
        work: folder for homes and logs.
        report: gets the starts, and is written after each.
    """
    work.mkdir(parents=True, exist_ok=True)
    order = places(options)
    for number, place in enumerate(order):
        for case, repository in options.cases.items():
            setting = setting_of(case, repository, options, work)
            # With --first-starts 0, `start_once` does not empty the home. It must not have files of
            # an earlier run.
            if number == 0:
                shutil.rmtree(setting.variables["HOME"], ignore_errors=True)
            if place == 0 and not options.keep_page_cache:
                folders = (options.triton_root, options.environment, repository)
                drop_page_cache(folder for folder in folders if folder)
            print(f"{case}: start {number + 1} of {len(order)}", file=sys.stderr, flush=True)
            done = start(case, number, setting, report, place=place)
            report.starts.append(done)
            # At once: the machine may be taken away.
            report.write()
            print(f"{case}: ready after {done.ready_s:.1f} s", file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    """Start the cases, write the report and print its tables; return the exit code 0."""
    options = parse(arguments)
    exit_on_sigterm()
    work = (options.work or Path(tempfile.mkdtemp(prefix="cold_start_"))).absolute()
    if options.environment:
        versions = machine.versions_of(options.environment)
    else:
        # Of the first case whose repository has a manifest.
        manifests = (versions_of(repository) for repository in options.cases.values())
        versions = next((found for found in manifests if found), {})
    command = f"python3 benchmarks/cold_start.py {shlex.join(arguments)}"
    page_cache = "dropped for the files of the repository and of Triton"
    if options.keep_page_cache:
        page_cache = "kept"
    report = Report(
        out=options.out,
        conditions=machine.describe(versions, options.triton_root, commit=options.commit),
        command=command,
        notes=[f"command: `{command}`", f"page cache before first starts: {page_cache}"],
    )
    start_all(options, work, report)
    print(table(report.starts), phase_table(report.starts), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
