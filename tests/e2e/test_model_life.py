"""Loads, unloads and neighbours: what a model leaves behind, and whom it disturbs."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from support.leftovers import name_of
from support.model_control import load, unload
from support.model_requests import STRANGE, ask_all, prompt
from support.patience import wait_for
from support.reference import ONE_THREAD
from support.server_processes import engines
from support.triton_client import get, stream, text_of
from vllm_env.serve.processes import end, traces
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from support.serving import Serve
    from vllm_env.serve.server import TritonServer

pytestmark = pytest.mark.e2e
PROMPT, ANSWER = FACTS[2]
CYCLES = 10  # with the engine; half as many without it
SLACK_MB = 64  # of the server's own memory over all cycles; an engine that stayed would be hundreds


@dataclass(frozen=True)
class Footprint:
    """What a server holds: its memory in MB, its processes and threads, and its files in shared memory."""

    memory: float
    processes: tuple[str, ...]
    threads: int
    shared: frozenset[str]


def footprint(server: TritonServer, *, real: bool) -> Footprint:
    """Looks at a server, and at what Python's multiprocessing has made for a real vLLM."""
    status = Path(f"/proc/{server.pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    members = server.members()
    names = tuple(sorted(name_of(process) for process in members))
    # psm_ and sem.mp- are made by Python's multiprocessing for vLLM, that of other tests' servers too
    ours = (server._shared_memory_prefix, *(("psm_", "sem.mp-") if real else ()))
    theirs = {path.name for path in traces(process for process in psutil.process_iter() if process not in members)}
    shared = frozenset(path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(ours)) - theirs
    return Footprint(int(fields["VmRSS"].split()[0]) / 1024, names, int(fields["Threads"]), shared)


def control(server: TritonServer, verb: str, model: str = "vllm") -> None:
    """Loads or unloads a model and waits until it is done."""
    ready = verb == "load"
    status, body = load(server, model) if ready else unload(server, model)
    assert status == 200, body
    wait_for(lambda: (get(server.http_url, f"/v2/models/{model}/ready")[0] == 200) == ready, f"the model's {verb}")


def test_loads_and_unloads_leak_nothing(light_serving: Serve, request: pytest.FixtureRequest) -> None:
    """After each unload no process, no thread and no shared memory of the model is left, and memory stays bounded."""
    real = bool(request.config.getoption("--slow"))
    explicit = ("--model-control-mode=explicit", "--load-model=vllm")
    with light_serving(environment=ONE_THREAD, arguments=explicit) as server:
        seen: list[Footprint] = []
        for cycle in range(CYCLES if real else CYCLES // 2):
            if cycle:
                control(server, "load")
            answers = ask_all(server, [prompt(text, {"temperature": 0}, stream=True) for text in (PROMPT, *STRANGE)] * 4)
            assert answers[0].text == ANSWER
            control(server, "unload")
            wait_for(lambda: _is_alone(server), lambda: f"the end of {server.members()}")
            if seen:  # Triton 26.07 removes it a moment later on a busy machine
                wait_for(lambda: footprint(server, real=real).shared <= seen[0].shared, lambda: f"the end of its memory: {seen}")
            seen.append(footprint(server, real=real))
        # gRPC starts threads for a burst, and ends them after a while without work.
        most = seen[1].threads + 2
        wait_for(lambda: footprint(server, real=real).threads <= most, lambda: f"the end of threads, {most} at most: {seen}")
    assert {one.processes for one in seen} == {seen[0].processes}
    assert seen[-1].memory - seen[1].memory < SLACK_MB, [one.memory for one in seen]


def _is_alone(server: TritonServer) -> bool:
    """The processes of an unloaded model end a moment after Triton calls the model unloaded."""
    return [process.pid for process in server.members()] == [server.pid]


@pytest.mark.slow
def test_two_models_with_one_environment(serving: Serve) -> None:
    """Both answer at the same time, and when the engine of one is killed the other goes on undisturbed."""

    def second(model: Path) -> None:
        shutil.copytree(model, model.parent / "other")

    with serving(environment=ONE_THREAD, prepare=second) as server:
        request = prompt(PROMPT, {"temperature": 0}, stream=True)
        with ThreadPoolExecutor(8) as clients:
            names = ["vllm", "other"] * 8
            told = list(clients.map(lambda name: text_of(stream(server.grpc_url, [request] * 4, model=name), 3), names))
        assert told == [ANSWER] * 16
        found = list(engines(server))
        assert len(found) == 2
        end(found[:1], grace=0)
        texts = [text_of(stream(server.grpc_url, [request], model=name)) for name in ("vllm", "other")]
        assert ANSWER in texts
