"""Measure the client itself, against a model that waits for known times and says when it did what.

A tritonserver on this machine serves ``known_delays.py``. The clock of both is the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from loadtest import loops, overhead
from loadtest.backends import client_for
from loadtest.endpoint import Endpoint
from loadtest.errors import ClientError, InputError
from loadtest.measures import e2el, itls, ttft
from loadtest.prompts import CHECKOUT
from loadtest.record import Outcome, Record, Request
from loadtest.samples import Samples

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

_PROGRAM = Path("bin", "tritonserver")
_PLACES = (CHECKOUT / ".triton" / _PROGRAM, Path("/opt/tritonserver") / _PROGRAM)
# Of a built model: what its environment and its stub need. The model's own code stays out.
_STUB = "triton_python_backend_stub"
_STUB_LIBRARIES = "stub_lib"
_CONFIG = "config.pbtxt"
# Where a model's environment is, in its configuration.
_OWN_FOLDER = re.compile(r"\$\$TRITON_MODEL_DIRECTORY")
_ENVIRONMENT = re.compile(r"parameters\s*{\s*key:\s*\"EXECUTION_ENV_PATH\".*?}\s*}", re.DOTALL)
# An archive of 4 GB takes a minute to extract.
_READY_SECONDS = 300.0
# tritonserver gives its models 30 s.
_EXIT_SECONDS = 45.0
# An answer takes 0.3 s. A model that hangs must not hang the client.
_ANSWER_SECONDS = 60.0
_POLL_SECONDS = 0.25
_FIRST_MS = 60
_GAP_MS = 15
_TOKENS = 16
_REQUESTS = 200
_CONCURRENCY = 4
_WARM_UPS = 8
# What a measurement may be off, in seconds and as a share.
_MOST_SECONDS = 0.002
_MOST_SHARE = 0.05


@dataclass
class Calibration:
    """What the client saw, and what the model did.

    Attributes:
        seen: the client's times by name (s).
        true: the model's times by name (s).
        errors: of each time, what the client saw less what the model did (s).
        sending: from the send to the model (s).
        receiving: from the model's send of a token to its arrival (s).
    """

    seen: dict[str, Samples] = field(default_factory=dict)
    true: dict[str, Samples] = field(default_factory=dict)
    errors: dict[str, list[float]] = field(default_factory=dict)
    sending: Samples = field(default_factory=Samples)
    receiving: Samples = field(default_factory=Samples)

    def add(self, record: Record) -> None:
        """Compare an answer, whose text has the model's times.

        Raises:
            ClientError: it is no such answer.
        """
        if record.outcome is not Outcome.ANSWERED:
            raise ClientError(f"a request failed: {record.reason}")
        came, *sent = map(float, record.text.split())
        if len(sent) != len(record.times):
            raise ClientError(f"the model sent {len(sent)} pieces, and {len(record.times)} came")
        truth = Record(record.request, due=came, sent=came, times=sent)
        self._compare("ttft", [ttft(record, record.sent)], [ttft(truth, came)])
        self._compare("itl", itls(record), itls(truth))
        self._compare("e2el", [e2el(record, record.sent)], [e2el(truth, came)])
        self.sending.extend([came - record.sent])
        late = [here - there for here, there in zip(record.times, sent, strict=True)]
        self.receiving.extend(late)

    def _compare(self, name: str, seen: list[float], true: list[float]) -> None:
        self.seen.setdefault(name, Samples()).extend(seen)
        self.true.setdefault(name, Samples()).extend(true)
        errors = [here - there for here, there in zip(seen, true, strict=True)]
        self.errors.setdefault(name, []).extend(errors)

    def lines(self) -> list[str]:
        """Return lines for the terminal."""
        found = []
        for name, seen in self.seen.items():
            # Answers of one token have no gap.
            if not seen.count:
                continue
            error = float(np.median(self.errors[name]))
            true = self.true[name].percentile(50)
            is_exact = abs(error) <= max(_MOST_SECONDS, _MOST_SHARE * true)
            verdict = "exact to 2 ms or 5 %" if is_exact else "off by more than 2 ms and 5 %"
            most = float(np.percentile(np.abs(self.errors[name]), 99))
            # Minus zero is no error.
            shown = round(error * 1e3, 2) + 0.0
            found.append(
                f"{name.upper()}: p50 {seen.percentile(50) * 1e3:.2f} ms, in the model "
                f"{true * 1e3:.2f} ms; error p50 {shown:+.2f} ms, p99 {most * 1e3:.2f} ms: "
                f"{verdict}"
            )
        found.append(
            f"Of this, p50 {self.sending.percentile(50) * 1e3:.2f} ms to the model and "
            f"{self.receiving.percentile(50) * 1e3:.2f} ms back, through Triton"
        )
        return found


def calibrate(options: argparse.Namespace) -> list[str]:
    """Serve the model with known delays, measure it, and return lines with the client's error.

    Raises:
        InputError: there is no tritonserver.
        ClientError: it does not serve the model.
    """
    server = _find_server(options.tritonserver)
    concurrency = options.max_concurrency or _CONCURRENCY
    count = options.num_prompts or _REQUESTS
    signals = _Signals()
    try:
        with signals.noted(), tempfile.TemporaryDirectory(prefix="loadtest_") as folder:
            _place_model(options.calibrate, Path(folder, "models", "vllm"))
            with _serving(server, Path(folder), signals) as running:
                found, client = asyncio.run(_measure(running, concurrency, count))
    finally:
        # The handler has ended the server. So the measurement may have failed with any error.
        if signals.came:
            raise KeyboardInterrupt
    head = f"{count} answers of {_TOKENS} tokens, {concurrency} at a time, from {server}"
    reasons = [f"The client was the bottleneck: {reason}" for reason in client.reasons()]
    return [head, *found.lines(), *reasons]


def _find_server(given: Path | None) -> Path:
    for place in [given] if given else _PLACES:
        if place.is_file():
            return place.absolute()
    where = given or _PLACES[0]
    raise InputError(
        f"there is no tritonserver at {where}, and --calibrate needs one; "
        "run ./gen_vllm_env.sh, which makes .triton, or name another with --tritonserver"
    )


def _place_model(built: Path, model: Path) -> None:
    """Place the model with known delays, with the environment of a built model if there is one."""
    code = model / "1"
    code.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("known_delays.py"), code / "model.py")
    try:
        text = (built / _CONFIG).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"cannot read {built / _CONFIG}: {error.strerror}; "
            "name the folder of a built model with --calibrate"
        ) from error
    if (built / _STUB).is_file():
        shutil.copy(built / _STUB, model)
        if (built / _STUB_LIBRARIES).is_dir():
            shutil.copytree(built / _STUB_LIBRARIES, model / _STUB_LIBRARIES)
        # Newer releases of Triton follow no link out of the model's folder.
        text = _OWN_FOLDER.sub(lambda _: str(built.absolute()), text)
    else:
        # Not built: the server's own stub and Python, which its container has.
        text = _ENVIRONMENT.sub("", text)
    (model / _CONFIG).write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class _Server:
    """A started tritonserver, its gRPC port and its log."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def require_running(self) -> None:
        if self.process.poll() is not None:
            status = self.process.returncode
            raise ClientError(f"tritonserver ended with status {status}; {self.last_lines()}")

    def last_lines(self) -> str:
        tail = self.log.read_text(errors="replace").strip().splitlines()[-5:]
        return f"its last lines: {' | '.join(tail)}"


@dataclass
class _Signals:
    """Notes the signals that end this program, and ends the server at once.

    The handler raises no exception. Inside gRPC, an exception can end this program with SIGSEGV.
    Elsewhere, it can leave the server running.

    Attributes:
        came: whether there was one.
        server: the process to end, once it is started.
    """

    came: bool = False
    server: subprocess.Popen[bytes] | None = None

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note Ctrl-C, SIGTERM and SIGHUP in this block, unless they are ignored (nohup)."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.getsignal(number) for number in numbers}
        taken = [number for number in numbers if before[number] is not signal.SIG_IGN]
        for number in taken:
            signal.signal(number, self._note)
        try:
            yield
        finally:
            for number in taken:
                signal.signal(number, before[number])

    def _note(self, *_: object) -> None:
        self.came = True
        self.end_server()

    def end_server(self) -> None:
        """End the server and its stub, which have nothing to keep."""
        if self.server and self.server.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.server.pid, signal.SIGKILL)


@contextlib.contextmanager
def _serving(server: Path, folder: Path, signals: _Signals) -> Iterator[_Server]:
    """Start the server, and end it."""
    port = _free_port()
    command = [
        str(server),
        f"--model-repository={folder / 'models'}",
        "--grpc-address=127.0.0.1",
        f"--grpc-port={port}",
        "--allow-http=false",
        "--allow-metrics=false",
    ]
    root = server.parent.parent
    # The launcher of .triton names it by a path that Triton can read.
    if not (root / "libexec").is_dir():
        command.append(f"--backend-directory={root / 'backends'}")
    place = folder / "server.log"
    with place.open("wb") as log:
        try:
            # In a session of its own: Ctrl-C ends it through this program only.
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        except OSError as error:
            raise InputError(
                f"{server} cannot be started: {error.strerror}; name another with --tritonserver"
            ) from error
    signals.server = process
    try:
        # A signal may have come before there was a server to end.
        if signals.came:
            raise KeyboardInterrupt
        yield _Server(process, port, place)
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_EXIT_SECONDS)
    finally:
        # After an error, or if it hangs.
        signals.end_server()
        process.wait()


def _free_port() -> int:
    while True:
        # Below the ephemeral ports, which the kernel gives to any program that asks.
        port = random.randrange(20000, 32000)  # noqa: S311 - nobody must guess it
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


async def _measure(
    server: _Server, concurrency: int, count: int
) -> tuple[Calibration, overhead.Overhead]:
    parameters = {"first_ms": _FIRST_MS, "gap_ms": _GAP_MS, "max_tokens": _TOKENS}
    calibration = Calibration()
    endpoint = Endpoint(f"127.0.0.1:{server.port}", "vllm", stream_timeout=_ANSWER_SECONDS)
    async with client_for("triton")(endpoint) as client:
        until = time.monotonic() + _READY_SECONDS
        while True:
            server.require_running()
            try:
                await client.require_model(("text_input",))
                break
            except ClientError as error:
                if time.monotonic() > until:
                    raise ClientError(f"{error}; {server.last_lines()}") from error
                await asyncio.sleep(_POLL_SECONDS)

        async def send(number: int, done: loops.Done) -> None:
            requests = (Request(index, "x", parameters, stream=True) for index in range(number))
            singles = ((request,) for request in requests)
            await loops.closed_loop([client] * min(concurrency, number), singles, done)

        await send(max(_WARM_UPS, concurrency), lambda _: None)
        watched = overhead.Overhead()
        async with overhead.watch(watched):
            await send(count, calibration.add)
    return calibration, watched
