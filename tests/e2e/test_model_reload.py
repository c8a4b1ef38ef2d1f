"""A model that nobody changed is not loaded again: serving it writes nothing into its folder. A changed one takes over."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.instances import with_instances
from support.leftovers import name_of
from support.metrics_page import read_metrics
from support.model_requests import ask, prompt
from support.open_stream import OpenStream
from support.patience import pause, wait_for, wait_for_line
from support.reference import ONE_THREAD
from support.settings import with_metrics, with_parameter
from support.triton_client import post
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from support.serving import Serve
    from vllm_env.serve.server import TritonServer

pytestmark = pytest.mark.e2e
PROMPT, ANSWER = FACTS[2]
POLLS = 5
LONG = {"temperature": 0, "max_tokens": 60_000, "ignore_eos": True}
TOKENS = 24
PATIENCE = 300.0


def files(model: Path) -> dict[str, float]:
    """Return a model's folder and everything in it with the time of change that Triton compares."""
    stats = {str(path.relative_to(model)): path.stat() for path in (model, *sorted(model.rglob("*")))}
    return {name: max(status.st_mtime, status.st_ctime) for name, status in stats.items()}


def written(model: Path, before: dict[str, float]) -> list[str]:
    """Return what is new; the latest time below the folder is what Triton compares."""
    now = files(model)
    assert max(now.values()) <= max(before.values())
    return sorted(now.keys() - before.keys())


def engines(server: TritonServer) -> list[int]:
    """Return the ids of the processes that a second load would add to, or replace."""
    return sorted(p.pid for p in server.members() if name_of(p).startswith("VLLM::EngineCor"))


@pytest.mark.parametrize("mode", ["explicit", "poll"])
def test_an_unchanged_model_is_loaded_once(serving: Serve, mode: str) -> None:
    """`load` of a loaded model, and the poll of its folder, find nothing new: the same processes go on.

    Triton looks at ctimes, too: a file of the folder that gets or loses a hard link somewhere else makes it load once more.
    """
    found: list[Path] = []
    arguments = {
        "explicit": ("--model-control-mode=explicit", "--load-model=vllm"),
        "poll": ("--model-control-mode=poll", "--repository-poll-secs=1"),
    }[mode]
    before: dict[str, float] = {}

    def prepare(model: Path) -> None:
        found.append(model)
        before.update(files(model))

    with serving(environment=ONE_THREAD, arguments=arguments, prepare=prepare) as server:
        running = engines(server)
        assert written(found[0], before) == []
        if mode == "explicit":
            assert post(server.http_url, "/v2/repository/models/vllm/load", {}, timeout=300)[0] == 200
        else:
            pause(POLLS)
        assert ask(server, PROMPT, {"temperature": 0}).text == PROMPT + ANSWER
        wait_for_line(server, "ready after")
        said = server.log.read_text(errors="replace")
        assert said.count("starting the engine and loading the model") == 1 + said.count("still starting the engine"), said[
            -6000:
        ]
        assert said.count("ready after") == 1
        # what an engine forks has its name until it becomes another program
        wait_for(lambda: engines(server) == running, lambda: f"the engines {running}: {engines(server)}\n{said[-6000:]}")
        assert written(found[0], before) == []


@pytest.mark.parametrize("counts", [(1, 1), (1, 2)], ids=("1-1", "1-2"))
def test_metrics_go_on_after_a_reload(serving: Serve, long_arguments: dict[str, object], counts: tuple[int, int]) -> None:
    """Triton loads the new instances before it unloads the old ones, and has a metric of both but once."""
    before, after = counts

    def prepare(model: Path) -> None:
        with_metrics(model)
        with_parameter(model, "UNLOAD_GRACE_SECONDS", "600")
        with_instances(model, before)

    arguments = ("--model-control-mode=explicit", "--load-model=vllm")
    with serving(long_arguments, environment=ONE_THREAD, arguments=arguments, prepare=prepare) as server:

        def tokens() -> float:
            return read_metrics(f"http://127.0.0.1:{server.ports.metrics}/metrics").total("vllm:generation_tokens_total")

        with OpenStream(server.grpc_url, prompt(PROMPT, LONG, stream=True)) as running:
            running.wait(1)
            old = _stubs(server)
            with_instances(server.repository / "vllm", after)
            with_parameter(server.repository / "vllm", "UNLOAD_GRACE_SECONDS", "3")
            assert post(server.http_url, "/v2/repository/models/vllm/load", {}, timeout=PATIENCE)[0] == 200
            _ask(server)  # of the new ones, while the old ones have a request
            assert _stubs(server) > old
            running.cancel()
            running.wait_end(PATIENCE)
        wait_for(lambda: not _stubs(server) & old)
        wait_for(lambda: tokens() >= TOKENS)
        begun = tokens()
        assert begun == TOKENS
        for number in range(1, 11):
            _ask(server)
            wait_for(lambda number=number: tokens() >= begun + number * TOKENS)
        assert post(server.http_url, "/v2/repository/models/vllm/unload", {}, timeout=PATIENCE)[0] == 200
        wait_for(lambda: not _stubs(server))
        assert server.running


def test_a_reload_with_more_instances_is_one_of_its_own(serving: Serve) -> None:
    """Its third instance does not find the load of two that still serves; a count that alone is changed is no reload."""
    arguments = ("--model-control-mode=explicit", "--load-model=vllm")
    with serving(environment=ONE_THREAD, arguments=arguments, prepare=lambda model: with_instances(model, 2)) as server:
        old = _stubs(server)
        with_instances(server.repository / "vllm", 3)
        with_parameter(server.repository / "vllm", "UNLOAD_GRACE_SECONDS", "3")
        status, reason = post(server.http_url, "/v2/repository/models/vllm/load", {}, timeout=PATIENCE)
        assert status == 200, reason
        wait_for(lambda: not _stubs(server) & old)
        assert len(_stubs(server)) == 3
        _ask(server)


def test_metrics_of_a_killed_instance_are_those_of_the_next(serving: Serve) -> None:
    """Nobody takes them away, so the next one counts on; they leave with it."""
    arguments = ("--model-control-mode=explicit", "--load-model=vllm")
    with serving(environment=ONE_THREAD, arguments=arguments, prepare=with_metrics) as server:

        def tokens() -> float:
            return read_metrics(f"http://127.0.0.1:{server.ports.metrics}/metrics").total("vllm:generation_tokens_total")

        _ask(server)
        wait_for(lambda: tokens() == TOKENS)
        for stub in _stubs(server):
            os.kill(stub, signal.SIGKILL)
        wait_for(lambda: not engines(server))
        for verb in ("unload", "load"):
            assert post(server.http_url, f"/v2/repository/models/vllm/{verb}", {}, timeout=PATIENCE)[0] == 200
        _ask(server)
        wait_for(lambda: tokens() == 2 * TOKENS)
        assert post(server.http_url, "/v2/repository/models/vllm/unload", {}, timeout=PATIENCE)[0] == 200
        wait_for(lambda: not tokens())
        assert server.running


def _ask(server: TritonServer) -> None:
    answer = ask(server, PROMPT, {**LONG, "max_tokens": TOKENS})
    assert not answer.error


def _stubs(server: TritonServer) -> set[int]:
    """Return the ids of the instances' processes."""
    return {process.pid for process in server.members() if name_of(process).startswith("triton_python_b")}
