"""Measure how long others wait for one request that asks for much.

    python3 benchmarks/neighbour.py --environment ENV --triton-root ROOT

A neighbour streams without a pause. Meanwhile one client sends an attack (`harness/attacks.py`),
and in the same round as many clients as it has completions ask for the same tokens. The table has
the neighbour's longest wait for its next piece, and the stub's memory after each kind of attack.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from harness import executors, machine, results
from harness.attacks import KINDS, Attack, attacks
from harness.options import add_server
from harness.processes import exit_on_sigterm
from harness.report import markdown
from harness.servers import Setting
from harness.shapes import SHAPES, write_checkpoint
from harness.targets import TritonTarget
from loadtest.backends import client_for
from loadtest.endpoint import Endpoint
from loadtest.record import Record, Request

_SHAPES = {"cpu": "small-opt", "gpu": "opt-125m"}
_ENGINE = {"load_format": "dummy", "max_model_len": 2048, "max_num_seqs": 512}
_BEFORE_S = 0.3
# What an attack leaves to be worked off counts, too.
_AFTER_S = 1.0
_LONGEST_S = 180.0
_MEMORY_S = 30.0


class Neighbour:
    """A client that streams without a pause.

    Attributes:
        moments: when it sent a request or got a piece, in seconds of ``time.perf_counter``.
        leaving: whether it is being cancelled.
    """

    def __init__(self, grpc: int) -> None:
        self._endpoint = Endpoint(f"127.0.0.1:{grpc}", "vllm")
        self.moments: list[float] = []
        self.leaving = False

    async def run(self) -> None:
        """Stream until this is cancelled.

        Raises:
            RuntimeError: a request failed.
        """
        parameters = {"max_tokens": 400, "ignore_eos": True, "temperature": 0.0}
        async with client_for("triton")(self._endpoint) as client:
            await client.require_model(("text_input",))
            index = 0
            while not self.leaving:
                now = time.perf_counter()
                self.moments.append(now)
                record = Record(Request(index, "w7", parameters, stream=True), due=now, sent=now)
                record.times = self.moments
                await client.ask(record.request, record)
                # The client notes a cancelled request as a failed one.
                if record.reason and not self.leaving:
                    raise RuntimeError(f"the neighbour's request failed: {record.reason}")
                index += 1

    def longest_wait(self, begin: float) -> float:
        """Return the longest wait since ``begin``, in seconds. One that has not ended counts."""
        moments = [*self.moments, time.perf_counter()]
        waits = [late - early for early, late in itertools.pairwise(moments) if late > begin]
        return max(waits)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_server(parser)
    add = parser.add_argument
    add(
        "--device",
        choices=("cpu", "gpu"),
        default="cpu",
        help="cpu: a model of two layers; gpu: OPT-125M",
    )
    add(
        "--kinds",
        type=int,
        nargs="+",
        default=[1, 2, 3, 4],
        help="of attacks, in their order (default: all)",
    )
    add("--rounds", type=int, default=3, help="of each attack (default: %(default)s)")
    add("--seconds", type=float, default=3600, help="begin no kind later (default: %(default)s)")
    add("--only-attacks", action="store_true", help="without the clients to compare with")
    results.add_options(parser, Path("benchmarks/results/neighbour"))
    return parser.parse_args(arguments)


class Attacker:
    """Sends attacks in a process of its own, while a neighbour streams.

    Attributes:
        process: runs ``harness/attacker.py``.
        neighbour: the neighbour.
        streaming: runs ``neighbour``.
    """

    def __init__(self, process: asyncio.subprocess.Process, grpc: int) -> None:
        self.process = process
        self._grpc = grpc
        self.begin_streaming()

    @classmethod
    async def start(cls, server: TritonTarget, shape: str) -> Attacker:
        """Start the process and the neighbour of a model of this shape."""
        program = str(Path(__file__).parent / "harness" / "attacker.py")
        ports = (str(server.grpc), str(server.http))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, program, *ports, shape),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        return cls(process, server.grpc)

    def begin_streaming(self) -> None:
        """Start a neighbour."""
        self.neighbour = Neighbour(self._grpc)
        self.streaming = asyncio.create_task(self.neighbour.run())

    async def end_streaming(self) -> None:
        """End the neighbour."""
        self.neighbour.leaving = True
        self.streaming.cancel()
        await asyncio.wait({self.streaming})

    async def send(self, attack: Attack) -> dict[str, Any]:
        """Send an attack; return the ends of its requests and the neighbour's longest wait (s).

        Raises:
            RuntimeError: the neighbour's request failed, or the attack took too long.
        """
        assert self.process.stdin
        assert self.process.stdout
        # With 300,000 entries this takes so long that the neighbour would seem to wait.
        message = json.dumps(asdict(attack)).encode() + b"\n"
        await asyncio.sleep(_BEFORE_S)
        begin = time.perf_counter()
        self.process.stdin.write(message)
        await self.process.stdin.drain()
        line = asyncio.create_task(self.process.stdout.readline())
        both = {line, self.streaming}
        await asyncio.wait(both, timeout=_LONGEST_S, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(_AFTER_S)
        if self.streaming.done():
            self.streaming.result()
        if not line.done():
            raise RuntimeError(f"{attack.name} took more than {_LONGEST_S:g} s")
        return {**json.loads(line.result()), "wait": self.neighbour.longest_wait(begin)}

    async def end(self) -> None:
        """End the process and the neighbour."""
        await self.end_streaming()
        self.process.kill()
        await self.process.wait()


async def measure(server: TritonTarget, options: argparse.Namespace) -> Found:
    """Return each attack's waits and ends, and the stub's memory."""
    shape = _SHAPES[options.device]
    everything = attacks(SHAPES[shape].vocabulary)
    found = Found()
    until = time.monotonic() + options.seconds
    attacker = await Attacker.start(server, shape)
    try:
        # The first large answers make the pools as large as they stay.
        for attack in everything[1:4]:
            await attacker.send(attack.as_clients())
        await found.note_memory("the warm-up", server, attacker)
        for number, kind in itertools.product(range(options.rounds), options.kinds):
            if time.monotonic() > until:
                break
            for attack in everything:
                if attack.kind + 1 != kind:
                    continue
                row = {"kind": KINDS[attack.kind], "name": attack.name, "round": number}
                row["attack"] = await attacker.send(attack)
                if not options.only_attacks:
                    row["clients"] = await attacker.send(attack.as_clients())
                row["stub_mb"] = _stub_mb(server)
                found.rows.append(row)
                say(json.dumps(row))
            when = f"round {number + 1} of {KINDS[kind - 1]}"
            await found.note_memory(when, server, attacker)
    finally:
        await attacker.end()
        # If a request of the neighbour failed, the table has the attacks before it.
        say(table(found.rows))
    return found


@dataclass
class Found:
    """What was measured.

    Attributes:
        rows: of each attack and round.
        memory: the stub's resident megabytes, with the time.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    memory: list[tuple[str, float]] = field(default_factory=list)

    async def note_memory(self, when: str, server: TritonTarget, attacker: Attacker) -> None:
        """End the neighbour's answer, wait, and add the stub's memory."""
        await attacker.end_streaming()
        await asyncio.sleep(_MEMORY_S)
        self.memory.append((when, _stub_mb(server)))
        say(f"stub 30 s after {when}: {self.memory[-1][1]:.0f} MB")
        attacker.begin_streaming()


def _stub_mb(server: TritonTarget) -> float:
    """Return the stub's resident memory."""
    return server.resident()["stub"] / 1e6


def table(rows: list[dict[str, Any]]) -> str:
    """Return the longest waits: medians of the rounds, with the least and the most."""
    by_name: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_name[row["kind"], row["name"]].append(row)
    lines = []
    for (kind, name), rounds in by_name.items():
        sides = [
            _waits([row[side] for row in rounds if side in row]) for side in ("attack", "clients")
        ]
        reasons = [row["attack"]["reason"] for row in rounds]
        lines.append([kind, name, *sides, next(filter(None, reasons), "")])
    head = ["kind", "request", "longest wait, s", "as many clients, s", "refused"]
    return markdown(head, lines)


def _waits(found: list[dict[str, Any]]) -> str:
    if not found:
        return "-"
    waits = [each["wait"] for each in found]
    return f"{median(waits):.2f} ({min(waits):.2f}-{max(waits):.2f})"


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    """Start the server, send the attacks, and write the report."""
    options = parse(arguments)
    exit_on_sigterm()
    work = (options.work or Path(tempfile.mkdtemp(prefix="neighbour_"))).absolute()
    shape = _SHAPES[options.device]
    checkpoint = write_checkpoint(SHAPES[shape], work / shape)
    on_gpu = options.device == "gpu"
    engine: dict[str, Any] = {"model": str(checkpoint), **_ENGINE}
    engine |= {"dtype": "float16"} if on_gpu else {"dtype": "float32", "enforce_eager": True}
    engine.update(executors.argument("uni", engine))
    setting = Setting.of(options, engine, work)
    server = TritonTarget(setting)
    versions = machine.versions_of(setting.environment)
    conditions = machine.describe(versions, setting.triton_root, commit=options.commit)
    command = f"python3 benchmarks/neighbour.py {shlex.join(arguments)}"
    try:
        server.start()
        found = asyncio.run(measure(server, options))
    finally:
        server.stop()
    stem = results.take(options.out, conditions.commit, command)
    memory = "\n".join(f"- stub 30 s after {when}: {size:.0f} MB" for when, size in found.memory)
    head = "\n".join([*conditions.lines(), f"- command: `{command}`"])
    results.write_text(stem, ["# A neighbour's longest wait", head, memory, table(found.rows)])
    results.write_json(stem, asdict(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
