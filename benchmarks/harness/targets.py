"""The ways to serve one model that are compared, each behind the same methods."""

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
"""Time for the servers to take the connections and streams, which clients keep open from load to load, s."""


class Target(Protocol):
    """Something that serves."""

    name: str

    def start(self) -> float:
        """Start it, wait until it is ready, and return the seconds that took."""

    def measure(self, load: Load) -> Measurement:
        """Put a load on it."""

    def executor(self) -> str:
        """Which executor its engine has."""

    def cpu(self) -> dict[str, float]:
        """CPU seconds used so far, by role."""

    def stop(self) -> None:
        """End every process of it."""


class EngineTarget(Server):
    """AsyncLLM in process: no server, no wire."""

    name = "engine"

    def start(self) -> float:
        """See `Target`."""
        started = time.monotonic()
        worker = Path(__file__).with_name("engine_worker.py")
        python = str(self.setting.environment / "bin" / "python")
        self.launch([python, str(worker), json.dumps(self.setting.arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._reply()
        return time.monotonic() - started

    def measure(self, load: Load) -> Measurement:
        """See `Target`."""
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
    """vLLM's own server, completions endpoint, without a line in the log for each request."""

    name = "openai"

    def start(self) -> float:
        """See `Target`."""
        started = time.monotonic()
        self.port = free_port()
        python = str(self.setting.environment / "bin" / "python")
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(self.port)]
        self.launch([*command, "--disable-uvicorn-access-log", *as_flags(self.setting.arguments)])
        self.wait_for(f"http://127.0.0.1:{self.port}/health")
        return time.monotonic() - started

    def measure(self, load: Load) -> Measurement:
        """See `Target`."""
        return run(self._measure(load))

    async def _measure(self, load: Load) -> Measurement:
        model = str(self.setting.arguments["model"])
        connections = [await HttpConnection.open(self.port) for _ in range(load.in_flight)]
        return await measure_and_close([OpenAIClient(connection, model) for connection in connections], load)


class TritonTarget(Server):
    """This project's model under the real tritonserver, the environment given as EXECUTION_ENV_PATH."""

    name = "triton"
    model = "vllm"
    stall_limit_s = 150.0  # as vllm_env's smoke run: extraction and the import of vLLM are silent for tens of seconds each

    def start(self) -> float:
        """See `Target`."""
        started = time.monotonic()
        self.http, self.grpc, metrics = free_port(), free_port(), free_port()
        repository = self.prepare()
        self.launch(
            [
                str(self.setting.triton_root / "bin" / "tritonserver"),
                f"--model-store={repository}",
                f"--backend-directory={self.setting.triton_root / 'backends'}",
                *(f"--{kind}-port={port}" for kind, port in (("http", self.http), ("grpc", self.grpc), ("metrics", metrics))),
                "--http-address=127.0.0.1",
                "--grpc-address=127.0.0.1",
                "--metrics-address=127.0.0.1",
            ]
        )
        self.metrics = metrics
        self.wait_for(f"http://127.0.0.1:{self.http}/v2/health/ready")
        return time.monotonic() - started

    def prepare(self) -> Path:
        """Copy the model beside the logs, with the benchmark's engine arguments and environment; return its store."""
        return place_model(self.setting, self.setting.work / f"store-{self.name}" / self.model)

    def measure(self, load: Load) -> Measurement:
        """See `Target`."""
        return run(self._measure(load))

    async def _measure(self, load: Load) -> Measurement:
        connection = await GrpcConnection.open(self.grpc)
        try:
            clients = [TritonGrpcClient(connection, self.model) for _ in range(load.in_flight)]
            return await measure_and_close(clients, load)
        finally:
            connection.close()


TARGETS: dict[str, Callable[[Setting], Target]] = {"engine": EngineTarget, "openai": OpenAITarget, "triton": TritonTarget}


async def measure_and_close(clients: Sequence[Client], load: Load) -> Measurement:
    """Run the load, then close the clients whatever happened."""
    await asyncio.sleep(_OPENED_S)
    try:
        return await run_load(clients, load)
    finally:
        for client in clients:
            await client.close()


def run(work: Coroutine[None, None, Measurement]) -> Measurement:
    """Run a coroutine, on uvloop where the benchmark's Python has it."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    result: Measurement = uvloop.run(work)
    return result
