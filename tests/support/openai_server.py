"""vLLM's own OpenAI server, as it comes with the packed environment: what ours is compared with."""

from __future__ import annotations

import os
import signal
import subprocess
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from support.patience import LIMIT, wait_for
from support.reference import ONE_THREAD
from support.serving import CPU_ENVIRONMENT, READY_SECONDS
from support.starts import OPENAI, note_start
from vllm_env.serve.server import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


@contextmanager
def openai_server(environment: Path, engine_args: Mapping[str, Any], log: Path) -> Iterator[str]:
    """Serve until the block ends; yield ``http://127.0.0.1:PORT``.

    Raises:
        AssertionError: it ended, or was not ready in time; the message holds the end of its log.
    """
    port = free_ports().http
    argv = [environment / "bin" / "python", "-m", "vllm.entrypoints.openai.api_server", "--host=127.0.0.1"]
    argv += [f"--port={port}", *(_option(name, value) for name, value in engine_args.items())]
    # FlashInfer's sampler compiles itself; without a toolkit vLLM's own server dies of the first request that samples with top_k.
    variables = {**os.environ, **CPU_ENVIRONMENT, **ONE_THREAD, "VLLM_USE_FLASHINFER_SAMPLER": "0", "PYTHONPATH": ""}
    note_start(OPENAI, engine_args)
    with log.open("wb") as sink:
        server = subprocess.Popen(argv, stdout=sink, stderr=sink, env=variables, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_ready(server, url, log)
        yield url
    finally:
        server.terminate()
        try:
            server.wait(LIMIT)
        finally:
            _end_group(server.pid)
            server.wait()


def _option(name: str, value: Any) -> str:
    option = f"--{name.replace('_', '-')}"
    return option if value is True else f"{option}={value}"


def _wait_ready(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    def is_ready() -> bool:
        assert server.poll() is None, f"vLLM's server has ended:\n{tail()}"
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=60):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def tail() -> str:
        return log.read_text(errors="replace")[-3000:]

    wait_for(is_ready, lambda: f"vLLM's server:\n{tail()}", limit=READY_SECONDS, longest_pause=0.5)


def _end_group(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
