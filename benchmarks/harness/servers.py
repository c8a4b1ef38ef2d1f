"""Start server processes, wait until they are ready, measure them, and end them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from google.protobuf import text_format
from tritonclient.grpc import InferenceServerClient
from tritonclient.grpc.model_config_pb2 import ModelConfig
from tritonclient.utils import InferenceServerException

from harness import executors, processes

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

_START_LIMIT_S = 600
# By default, vLLM pins its CPU worker to core 0 and spins there. On two cores, every other process
# that the scheduler puts on that core then stops for seconds, with every target. Without pinning,
# the same load is up to six times as fast.
CPU_VARIABLES = {
    # In GiB. By default, the cache is a fraction of the machine's memory, for each target.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
# FlashInfer's sampler is compiled at the first request, and a host may have no compiler.
GPU_VARIABLES = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}


@dataclass(frozen=True)
class Setting:
    """The setting that all targets share.

    Attributes:
        environment: the unpacked environment.
        triton_root: the Triton root.
        model_repository: where the model is copied from.
        arguments: the engine arguments, with the checkpoint.
        variables: environment variables of the servers.
        work: folder for logs.
        instances: number of front ends, of Triton's model and of vLLM's server.
    """

    environment: Path
    triton_root: Path
    model_repository: Path
    arguments: dict[str, object]
    variables: dict[str, str]
    work: Path
    instances: int = 1

    @classmethod
    def of(
        cls,
        options: argparse.Namespace,
        arguments: dict[str, object],
        work: Path,
        instances: int = 1,
    ) -> Setting:
        """Return the setting for a command line.

        Args:
            options: has the options of ``options.add_server``, and ``device``.
            arguments: see ``Setting``.
            work: see ``Setting``.
            instances: see ``Setting``.
        """
        return cls(
            environment=options.environment.absolute(),
            triton_root=options.triton_root.absolute(),
            model_repository=options.model_repository.absolute(),
            arguments=arguments,
            variables=GPU_VARIABLES if options.device == "gpu" else CPU_VARIABLES,
            work=work,
            instances=instances,
        )


class StartFailedError(Exception):
    """A target did not become ready; the message names its log."""


class Server:
    """A server process in a session of its own, with its log in a file.

    Attributes:
        name: the target's name, which is the name of its log, too.
        stall_limit_s: a start counts as stuck after this many seconds without a line in the log.
    """

    name = ""
    stall_limit_s: float = _START_LIMIT_S

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.log = setting.work / f"{self.name}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def launch(
        self, command: list[str], *, stdin: int | None = None, stdout: IO[bytes] | int | None = None
    ) -> None:
        """Start the process; its output goes to the log. It sets ``process``.

        Args:
            command: the program and its arguments.
            stdin: as for ``subprocess.Popen``.
            stdout: where its standard output goes instead.
        """
        # No usage statistics and no access to the hub during a measurement.
        variables = {
            **os.environ,
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            **self.compiler(),
            **self.setting.variables,
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=stdout or log,
                stderr=log,
                env=variables,
                # `stop` ends all of the session, as vLLM's processes may survive their parent.
                start_new_session=True,
            )

    def compiler(self) -> dict[str, str]:
        """Return the variable that names the environment's C compiler, if vLLM needs to be told.

        By default it does not.
        """
        return {}

    def wait_for(self, url: str) -> None:
        """Wait until ``url`` answers without an error status.

        Raises:
            StartFailedError: the server ends, is silent too long, or takes too long.
        """
        limit = time.monotonic() + _START_LIMIT_S
        while True:
            self._require_progress(limit)
            try:
                with urllib.request.urlopen(url, timeout=5):
                    return
            # A refused connection, or an error status: it is still loading.
            except OSError:
                time.sleep(0.1)

    def require_name(self, name: str, http: int, grpc: int) -> None:
        """Check that both ports belong to the Triton that was started with ``--id`` and this name.

        Raises:
            StartFailedError: another server answers on one of them.
        """
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{http}/v2", timeout=5) as answer:
                names = {http: json.load(answer).get("name")}
            # Not by way of a proxy that http_proxy names.
            direct = [("grpc.enable_http_proxy", 0)]
            with InferenceServerClient(f"127.0.0.1:{grpc}", channel_args=direct) as client:
                names[grpc] = client.get_server_metadata(client_timeout=5).name
        except (OSError, ValueError, InferenceServerException) as error:
            raise StartFailedError(f"{self.name} does not tell its name: {error}") from error
        for port, found in names.items():
            if found != name:
                raise StartFailedError(f"{self.name}: another server answers on port {port}")

    def _require_progress(self, limit: float) -> None:
        """Check that the server still starts; ``limit`` is the last time, by ``time.monotonic()``.

        Raises:
            StartFailedError: it has ended, has been silent too long, or takes too long.
        """
        status = self.running().poll()
        if status is not None:
            why = f"ended with status {status}"
        # The log changes with each line that the server writes.
        elif time.time() - self.log.stat().st_mtime > self.stall_limit_s:
            why = f"said nothing for {self.stall_limit_s:.0f} s"
        elif time.monotonic() > limit:
            why = f"took {_START_LIMIT_S} s"
        else:
            return
        raise StartFailedError(f"{self.name} {why} before it was ready; see {self.log}")

    def running(self) -> subprocess.Popen[bytes]:
        """Return the started process.

        Raises:
            StartFailedError: it was not started.
        """
        if self.process is None:
            raise StartFailedError(f"{self.name} was not started")
        return self.process

    def cpu(self) -> dict[str, float]:
        """Return the CPU seconds used so far, by role."""
        return processes.by_role(self.running().pid, processes.cpu_seconds)

    def executor(self) -> str:
        """Return the executor of the started engine, judged by its processes."""
        # The amount of each process is 1, so the sum is the number of processes.
        roles = processes.by_role(self.running().pid, lambda _: 1)
        return executors.executor_of(roles)

    def resident(self) -> dict[str, float]:
        """Return the resident bytes, by role; see ``processes.resident``."""
        return processes.by_role(self.running().pid, processes.resident)

    def stop(self) -> None:
        """End every process of the server."""
        if self.process is not None:
            processes.end_session(self.process.pid)
            self.process.wait()


def own_compiler(environment: Path) -> dict[str, str]:
    """Return the variable CC for vLLM without the adapter, which would set it by itself.

    It names the environment's C compiler. If the host has one, or the environment has none, return
    no variable.
    """
    compiler = environment / "bin" / "vllm-env-cc"
    has_one = "CC" in os.environ or shutil.which("gcc") or shutil.which("clang")
    return {"CC": str(compiler)} if compiler.exists() and not has_one else {}


def place_model(
    setting: Setting, destination: Path, parameters: Mapping[str, str] | None = None
) -> Path:
    """Copy the model and configure it for the benchmark.

    Args:
        setting: names the model repository, the environment and the engine arguments.
        destination: the new folder of the model, with the model's name.
        parameters: more parameters of config.pbtxt.

    Returns:
        the new model repository.
    """
    shutil.rmtree(destination, ignore_errors=True)
    model = setting.model_repository / destination.name
    # Without its archive, which may have gigabytes: the setting's environment is unpacked.
    ignore = shutil.ignore_patterns("*.tar.gz", "*.tar", "__pycache__")
    shutil.copytree(model, destination, ignore=ignore)
    # The engine arguments.
    arguments = json.dumps(setting.arguments)
    (destination / "vllm_engine_args.json").write_text(arguments, encoding="utf-8")
    # The configuration.
    file = destination / "config.pbtxt"
    # Comments may have other bytes than UTF-8.
    text = file.read_text(encoding="utf-8", errors="surrogateescape")
    config = text_format.Parse(text, ModelConfig())
    config.parameters["EXECUTION_ENV_PATH"].string_value = str(setting.environment)
    for name, value in (parameters or {}).items():
        config.parameters[name].string_value = value
    config.instance_group[0].count = setting.instances
    file.write_text(text_format.MessageToString(config), encoding="utf-8")
    place_stub(destination, setting)
    return destination.parent


def place_stub(destination: Path, setting: Setting) -> None:
    """Copy the Triton root's stub into a model without one, if it has one for this Python."""
    stub = destination / "triton_python_backend_stub"
    if stub.exists():
        return
    # A stub works with one version of Python only, which the environment's bin/python3.X names.
    for python in (setting.environment / "bin").glob("python3.*[0-9]"):
        version = python.name.removeprefix("python")
        prebuilt = setting.triton_root / "python_backend_stubs" / version / stub.name
        if prebuilt.is_file():
            shutil.copy2(prebuilt, stub)


def as_flags(arguments: dict[str, object]) -> list[str]:
    """Return engine arguments as flags of vLLM's server, such as ``--max-model-len 512``."""
    flags = []
    for key, value in arguments.items():
        name = key.replace("_", "-")
        # A flag for True or False has no value.
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        else:
            flags += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


def free_port() -> int:
    """Return a random free port of 127.0.0.1; another program may still take it."""
    while True:
        # Below the ephemeral ports, which the kernel gives to any program that asks.
        port = random.randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def last_reason(log: str) -> str:
    """Return the last reason of a failed load in a server's log, in one line; "" if there is none.

    It is from Triton's table of the models, or else the last error.
    """
    # A row of the model, "| vllm | 1 | UNAVAILABLE: … |". A long reason goes on in the last column
    # of further rows, whose other columns are empty.
    if found := re.findall(
        r"^\| \w+ +\| \d+ +\| (UNAVAILABLE.*(?:\n\| +\| +\| .*)*)", log, re.MULTILINE
    ):
        # The match begins within the first row, whose bar is put in front of it again.
        rows = [line.split("|")[-2].strip() for line in f"| {found[-1]}".splitlines()]
        return " ".join(" ".join(rows).split())
    # "ValueError: …" with the indented lines after it.
    errors = re.findall(
        r"^.*?((?:[\w.]*Error|Exception|error): ?.+(?:\n {2,}\S.*)*)$", log, re.MULTILINE
    )
    return " ".join(errors[-1].split()) if errors else ""
