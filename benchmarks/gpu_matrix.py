"""Serve each way in which people configure a model on a GPU, and say which ones work.

    python3 benchmarks/gpu_matrix.py --environment ENV --triton-root ROOT --gpus 2 --page PAGE.md

A row is a configuration with a small model of dummy weights. The stock tritonserver loads it, and
answers whole and streamed over Triton and the OpenAI port. Its log probabilities are compared with
those of the engine in process. Then the server is stopped by SIGTERM, and must leave nothing.

Each result is written to `--out` at once. A row that has a result for the same model code and lock
is skipped, so a run can be continued. With `--device cpu`, one row can be tried without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil

from harness import machine
from harness.matrix_rows import ROWS, Row, digest, select
from harness.matrix_serve import run_row
from harness.options import add_server
from harness.processes import exit_on_sigterm
from harness.report import markdown
from harness.servers import last_reason
from harness.targets import require_openai_client

# After its limit, a row has this long to end its servers.
_END_LIMIT_S = 60
# The exit status of ``exit_on_sigterm``.
_STOPPED = 143
# Each takes a fifth of the GPU's memory (COMMON_ARGUMENTS).
_MOST_AT_ONCE = 4
_DRIVER = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options; ``rows`` has the rows themselves, not only their names.

    With ``--list``, print the rows and exit.
    """
    # Before the parser, which demands --environment.
    if "--list" in arguments:
        for row in ROWS:
            print(f"{row.name}  ({row.gpus} GPU{'s' * (row.gpus > 1)}, {row.shape}, {row.check})")
        sys.exit(0)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_server(parser)
    add = parser.add_argument
    add("--rows", nargs="+", default=[], metavar="NAME", help="only these rows, in this order")
    add("--list", action="store_true", help="show the names of the rows, and end")
    add("--gpus", type=int, choices=(1, 2), default=1, help="GPUs to use (default: %(default)s)")
    add("--device", choices=("gpu", "cpu"), default="gpu")
    add(
        "--at-once",
        type=int,
        choices=range(1, _MOST_AT_ONCE + 1),
        default=1,
        metavar="N",
        help="rows side by side on a GPU, which then start more slowly (default: %(default)s)",
    )
    add("--limit", type=float, default=240, metavar="S", help="for a row (default: %(default)s)")
    add("--no-compare", action="store_true", help="leave the engine in process out: twice as fast")
    add("--again", action="store_true", help="run also rows that have a result")
    add("--out", type=Path, default=Path("gpu_matrix.json"), metavar="FILE", help="the results")
    add("--page", type=Path, metavar="FILE", help="write a page in Markdown")
    add("--commit", default="", help="commit for the page of a copy without git history")
    # Each row runs in a process of its own, which is this program with this option.
    add("--one", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not (options.model_repository / "vllm" / "config.pbtxt").is_file():
        parser.error(f"{options.model_repository} has no model vllm: build it with gen_vllm_env.sh")
    if not (options.environment / "bin" / "python").exists():
        parser.error(f"{options.environment} has no bin/python: gen_vllm_env.sh unpack makes it")
    try:
        options.rows = select(options.rows, options.gpus)
    except ValueError as error:
        parser.error(str(error))
    return options


class Results:
    """The results in a file, by the rows' names; each is written at once.

    Args:
        file: may not exist yet.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        self.by_name: dict[str, dict[str, Any]] = {}
        if file.is_file():
            self.by_name = json.loads(file.read_text("utf-8"))

    def has(self, name: str, wanted: str) -> bool:
        """Return whether a row has a result for this digest."""
        return self.by_name.get(name, {}).get("digest") == wanted

    def put(self, name: str, result: dict[str, Any]) -> None:
        """Add a result."""
        with self._lock:
            self.by_name[name] = result
            new = self._file.with_name(f"{self._file.name}.new")
            new.write_text(json.dumps(self.by_name, indent=1) + "\n", encoding="utf-8")
            # A run that is killed leaves the old file or the new one.
            new.replace(self._file)


def run_in_process(row: Row, options: argparse.Namespace, devices: str, work: Path) -> Any:
    """Run a row in a process of its own, which ends at the limit; return the result.

    The result is that of ``run_row``. It is None if the process was stopped before its limit, as by
    the end of this program.

    Args:
        row: the row.
        options: the command line's options.
        devices: the GPUs of the row, as for CUDA_VISIBLE_DEVICES.
        work: folder for the logs and the result.
    """
    work.mkdir(parents=True, exist_ok=True)
    own_options = [
        *("--environment", options.environment, "--triton-root", options.triton_root),
        *("--model-repository", options.model_repository, "--work", work, "--one", row.name),
        *("--device", options.device, "--gpus", options.gpus),
        *(["--no-compare"] if options.no_compare else []),
    ]
    command = [sys.executable, str(Path(__file__).resolve()), *map(str, own_options)]
    environment = {**os.environ, **row.environment()}
    if options.device == "gpu":
        environment["CUDA_VISIBLE_DEVICES"] = devices
    with (work / "row.log").open("wb") as log:
        child = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        child.wait(options.limit)
    except subprocess.TimeoutExpired:
        # At SIGTERM, it stops its servers itself (``exit_on_sigterm``).
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        server = work / "triton.log"
        reason = last_reason(server.read_text("utf-8", "replace")) if server.is_file() else ""
        return {"ok": False, "message": f"took over {options.limit:.0f} s. {reason}".strip()}
    finally:
        # It still runs if an exception ends this program.
        if child.poll() is None:
            child.terminate()
            child.wait()
    file = work / "result.json"
    if child.returncode == _STOPPED:
        return None
    # Without a result, the process has failed. The last line of a traceback has the error.
    if not file.is_file():
        lines = (work / "row.log").read_text("utf-8", "replace").strip().splitlines()
        return {"ok": False, "message": lines[-1] if lines else f"status {child.returncode}"}
    return json.loads(file.read_text("utf-8"))


def run_all(rows: list[Row], options: argparse.Namespace, results: Results, work: Path) -> None:
    """Run the rows: those of one GPU side by side, and then those of two.

    Args:
        rows: the rows.
        options: the command line's options.
        results: gets each result at once.
        work: has a folder for each row.
    """
    # The numbers of the GPUs, each as often as it has room for another row.
    free: queue.SimpleQueue[str] = queue.SimpleQueue()
    for _ in range(options.at_once):
        for device in range(options.gpus):
            free.put(str(device))

    def run_one(row: Row) -> None:
        """Run a row on a GPU with room for it, or on all GPUs; add its result."""
        devices = free.get() if row.gpus == 1 else ",".join(map(str, range(row.gpus)))
        started = time.monotonic()
        try:
            result = run_in_process(row, options, devices, work / row.name)
        finally:
            if row.gpus == 1:
                free.put(devices)
        if result is None:
            print(f"{row.name}: stopped, no result", flush=True)
            return
        result["digest"] = digest(row, options.model_repository / "vllm", options.device)
        result["seconds"] = round(time.monotonic() - started, 1)
        result["when"] = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC"
        results.put(row.name, result)
        print(f"{row.name}: {verdict(result)}", flush=True)

    for gpus, threads in ((1, options.gpus * options.at_once), (2, options.at_once)):
        with ThreadPoolExecutor(threads) as pool:
            try:
                # list() waits for all rows, and raises the first exception of one.
                list(pool.map(run_one, [row for row in rows if row.gpus == gpus]))
            except BaseException:
                # The pool waits for its rows, which would run on to their limits.
                for child in psutil.Process().children():
                    child.terminate()
                raise


def verdict(result: dict[str, Any]) -> str:
    """Return a result in one line."""
    ready = result.get("seconds_to_ready")
    words = [
        "works" if result["ok"] else "FAILS",
        f"ready after {ready} s" if ready else "",
        str(result.get("message", "")),
    ]
    if own := result.get("own_server"):
        words.append(f"vLLM's own server: {own}")
    return "; ".join(filter(None, words))


def page(head: list[str], results: dict[str, dict[str, Any]]) -> str:
    """Return the page: the conditions, and a table with a line for each row with a result.

    Args:
        head: lines with the conditions.
        results: the results by the rows' names.
    """
    cells = []
    for row in ROWS:
        if not (result := results.get(row.name)):
            continue
        difference = "-"
        if "difference" in result:
            difference = f"{result['difference']:.2g} ({result['from_itself']:.2g})"
            difference += "" if result["tells"] else ", says nothing"
        own = result.get("own_server")
        message = result.get("message", "") + (f" (vLLM's own server: {own})" if own else "")
        success = "refused, as it must be" if row.check == "refused" else "works"
        cells.append(
            [
                row.name,
                str(row.gpus),
                success if result["ok"] else "**fails**",
                str(result.get("seconds_to_ready", "-")),
                str(result.get("seconds_to_stop", "-")),
                difference,
                # A bar would end the cell, and a line end the row.
                " ".join(message.replace("|", r"\|").split()),
            ]
        )
    heads = ["row", "GPUs", "result", "s to ready", "s to stop", "difference (own)", "message"]
    text = (
        "Difference: the largest one of log probabilities between the server and the engine in "
        "process. In brackets: the engine's difference from itself. It says nothing if another "
        "prompt's would be within twice that."
    )
    return (
        "\n\n".join(["# What works on a GPU", "\n".join(head), text, markdown(heads, cells)]) + "\n"
    )


def _head(options: argparse.Namespace, arguments: list[str]) -> list[str]:
    """Return the lines for the head of the page: machine, versions, driver and command."""
    environment = options.environment
    conditions = machine.describe(
        machine.versions_of(environment), options.triton_root, commit=options.commit
    )
    lines = conditions.lines()
    if options.device == "gpu":
        # It prints the version for each GPU.
        done = subprocess.run(_DRIVER, capture_output=True, text=True, check=False)
        lines.append(f"- driver {', '.join(sorted(set(done.stdout.split())))}")
    return [*lines, f"- command: `python3 benchmarks/gpu_matrix.py {' '.join(arguments)}`"]


def main(arguments: list[str]) -> int:
    """Run the rows that have no result yet; return 1 if one of the chosen rows does not work."""
    options = parse(arguments)
    require_openai_client()
    # In a row's process: the servers are stopped before it ends.
    exit_on_sigterm()
    work = (options.work or Path(tempfile.mkdtemp(prefix="gpu_matrix_"))).absolute()
    # This is the process of one row: see ``run_in_process``.
    if options.one:
        row = next(row for row in ROWS if row.name == options.one)
        (work / "result.json").write_text(json.dumps(run_row(row, options, work)), "utf-8")
        return 0
    results = Results(options.out)
    model = options.model_repository / "vllm"
    rows = []
    for row in options.rows:
        if not options.again and results.has(row.name, digest(row, model, options.device)):
            print(f"{row.name}: skipped, {verdict(results.by_name[row.name])}")
        else:
            rows.append(row)
    run_all(rows, options, results, work)
    if options.page:
        options.page.write_text(page(_head(options, arguments), results.by_name), "utf-8")
    names = [row.name for row in options.rows]
    return int(any(not results.by_name.get(name, {}).get("ok") for name in names))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
