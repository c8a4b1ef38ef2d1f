"""The compared ways to serve one model, all with the same methods."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from harness.grpc_client import GrpcConnection, TritonGrpcClient
from harness.http_client import HttpConnection, OpenAIClient
from harness.load import Client, run_load
from harness.metrics import Measurement
from harness.servers import Server, Setting, StartFailedError, as_flags, free_port, place_model
from harness.workload import Load

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence


_OPENED_S = 0.2
"""Time for the servers to accept the connections and streams, which clients keep open between loads (s)."""


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

    def stop(self) -> None:
        """End every process of it."""


class EngineTarget(Server):
    """vLLM's AsyncLLM in one process with the load generator: no server, no network."""

    name = "engine"

    def start(self) -> float:
        """See ``Target``."""
        started = time.monotonic()
        worker = Path(__file__).with_name("engine_worker.py")
        python = str(self.setting.environment / "bin" / "python")
        self.launch(
            [python, str(worker), json.dumps(self.setting.arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._reply()
        return time.monotonic() - started

    def measure(self, load: Load) -> Measurement:
        """See ``Target``."""
        stdin = self.running().stdin
        assert stdin is not None
        stdin.write(json.dumps(asdict(load)).encode() + b"\n")
        stdin.flush()
        return Measurement(**self._reply())

    def _reply(self) -> dict[str, Any]:
        stdout = self.running().stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise StartFailedError(f"{self.name} ended; see {self.log}")
        reply: dict[str, Any] = json.loads(line)
        return reply


class OpenAITarget(Server):
    """vLLM's own server with its completions endpoint, without a log line for each request."""

    name = "openai"

    def start(self) -> float:
        """See ``Target``."""
        started = time.monotonic()
        self.port = free_port()
        python = str(self.setting.environment / "bin" / "python")
        command = [
            python,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
        ]
        self.launch([*command, "--disable-uvicorn-access-log", *as_flags(self.setting.arguments)])
        self.wait_for(f"http://127.0.0.1:{self.port}/health")
        return time.monotonic() - started

    def measure(self, load: Load) -> Measurement:
        """See ``Target``."""
        return run(self._measure(load))

    async def _measure(self, load: Load) -> Measurement:
        model = str(self.setting.arguments["model"])
        connections = [await HttpConnection.open(self.port) for _ in range(load.in_flight)]
        return await measure_and_close(
            [OpenAIClient(connection, model) for connection in connections], load
        )


class TritonTarget(Server):
    """This project's model in the real tritonserver; EXECUTION_ENV_PATH names the environment."""

    name = "triton"
    model = "vllm"
    stall_limit_s = 150.0  # as in vllm_env's smoke run: extraction and vLLM's import are each silent for tens of seconds

    def start(self) -> float:
        """See ``Target``."""
        started = time.monotonic()
        self.http, self.grpc, metrics = free_port(), free_port(), free_port()
        repository = self.prepare()
        self.launch(
            [
                str(self.setting.triton_root / "bin" / "tritonserver"),
                f"--model-store={repository}",
                f"--backend-directory={self.setting.triton_root / 'backends'}",
                *(
                    f"--{kind}-port={port}"
                    for kind, port in (
                        ("http", self.http),
                        ("grpc", self.grpc),
                        ("metrics", metrics),
                    )
                ),
                "--http-address=127.0.0.1",
                "--grpc-address=127.0.0.1",
                "--metrics-address=127.0.0.1",
            ]
        )
        self.metrics = metrics
        self.wait_for(f"http://127.0.0.1:{self.http}/v2/health/ready")
        return time.monotonic() - started

    def prepare(self) -> Path:
        """Copy the model next to the logs, with the benchmark's engine arguments and environment; return its repository."""
        return place_model(self.setting, self.setting.work / f"store-{self.name}" / self.model)

    def measure(self, load: Load) -> Measurement:
        """See ``Target``."""
        return run(self._measure(load))

    async def _measure(self, load: Load) -> Measurement:
        connection = await GrpcConnection.open(self.grpc)
        try:
            clients = [TritonGrpcClient(connection, self.model) for _ in range(load.in_flight)]
            return await measure_and_close(clients, load)
        finally:
            connection.close()


TARGETS: dict[str, Callable[[Setting], Target]] = {
    "engine": EngineTarget,
    "openai": OpenAITarget,
    "triton": TritonTarget,
}


async def measure_and_close(clients: Sequence[Client], load: Load) -> Measurement:
    """Run the load; close the clients in any case."""
    await asyncio.sleep(_OPENED_S)
    try:
        return await run_load(clients, load)
    finally:
        for client in clients:
            await client.close()


def run(work: Coroutine[None, None, Measurement]) -> Measurement:
    """Run a coroutine, on uvloop if this Python has it."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    result: Measurement = uvloop.run(work)
    return result
