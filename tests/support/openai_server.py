"""vLLM's own OpenAI server, as it comes with the packed environment: what ours is compared with.

`kept_server` keeps its answers as `reference.py` keeps those of the other references. What the server answers depends on
its prefix cache, so an answer is kept for a request together with all requests before it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import urllib.request
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from support.patience import LIMIT, wait_for
from support.reference import ONE_THREAD, kept, place_of
from support.serving import READY_SECONDS, variables_for
from support.starts import OPENAI, note_start
from support.triton_client import post
from vllm_env.serve.server import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class KeptServer:
    """Answers requests as vLLM's server does. The server is started for the first answer that no earlier run has kept.

    It is then asked what was asked before, too, so that its prefix cache holds what it would hold.
    """

    def __init__(self, environment: Path, engine_args: Mapping[str, Any], log: Path) -> None:
        self._environment = environment
        self._engine_args = dict(engine_args)
        self._log = log
        self._asked: list[tuple[str, Any]] = []
        self._places: list[Path] = []
        self._url = ""
        self._running = ExitStack()

    def ask(self, path: str, body: Any) -> str:
        """Return the body of the answer: JSON, or the events of a stream.

        Raises:
            AssertionError: The server refuses the request.
        """
        self._asked.append((path, body))
        asked = [self._engine_args, self._asked]
        model = Path(self._engine_args["model"])
        self._places.append(place_of(self._environment, "openai_server.py", asked, model))
        answer: str = kept(self._environment, "openai_server.py", asked, model, self._post)
        return answer

    def forget(self, count: int) -> None:
        """Keep no answer to the last ``count`` requests: a later run asks again."""
        for place in self._places[len(self._places) - count :]:
            place.unlink(missing_ok=True)

    def close(self) -> None:
        """End the server, if it was started."""
        self._running.close()

    def _post(self) -> str:
        if not self._url:
            self._url = self._running.enter_context(openai_server(self._environment, self._engine_args, self._log))
            for path, body in self._asked[:-1]:
                post(self._url, path, body, timeout=300)
        path, body = self._asked[-1]
        status, answer = post(self._url, path, body, timeout=300)
        assert status == 200, answer
        return answer


@contextmanager
def kept_server(environment: Path, engine_args: Mapping[str, Any], log: Path) -> Iterator[KeptServer]:
    """Yield a server whose answers are kept; ``engine_args`` name the model."""
    server = KeptServer(environment, engine_args, log)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def openai_server(environment: Path, engine_args: Mapping[str, Any], log: Path) -> Iterator[str]:
    """Serve until the block ends; yield ``http://127.0.0.1:PORT``.

    Raises:
        AssertionError: it ended, or was not ready in time; the message holds the end of its log.
    """
    port = free_ports().http
    argv: list[str | Path] = [environment / "bin" / "python", "-m", "vllm.entrypoints.openai.api_server", "--host=127.0.0.1"]
    argv += [f"--port={port}", *(_option(name, value) for name, value in engine_args.items())]
    # FlashInfer's sampler compiles itself; without a toolkit vLLM's own server dies of the first request that samples with top_k.
    variables = {
        **os.environ,
        **variables_for(engine_args),
        **ONE_THREAD,
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "PYTHONPATH": "",
    }
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
    reason = "it was not asked"

    def is_ready() -> bool:
        nonlocal reason
        assert server.poll() is None, f"vLLM's server has ended:\n{tail()}"
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=60):
                return True
        except OSError as error:
            reason = repr(error)
            return False

    def tail() -> str:
        return log.read_text(errors="replace")[-3000:]

    def what() -> str:
        state = psutil.Process(server.pid).status()
        return f"vLLM's server, whose process is {state} (/health: {reason}):\n{tail()}"

    wait_for(is_ready, what, limit=READY_SECONDS, longest_pause=0.5)


def _end_group(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
