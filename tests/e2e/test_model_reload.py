"""A model that nobody changed is not loaded again: serving it writes nothing into its folder. A changed one takes over."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.instances import with_instances
from support.kill import kill_at_rest
from support.leftovers import name_of
from support.metrics_page import read_metrics
from support.model_control import GIVEN_UP, load, unload
from support.model_requests import ask, prompt
from support.open_stream import OpenStream
from support.patience import pause, wait_for
from support.reference import ONE_THREAD
from support.server_processes import stubs
from support.settings import with_metrics, with_parameter
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.serving import Serve
    from vllm_env.serve.server import TritonServer

pytestmark = pytest.mark.e2e
PROMPT, ANSWER = FACTS[2]
POLLS = 5
LONG = {"temperature": 0, "max_tokens": 60_000, "ignore_eos": True}
TOKENS = 24
COUNTED = "vllm:generation_tokens_total"
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


@dataclass(frozen=True)
class Explicit:
    """A server that loads and unloads models as it is told, and the folder of a test's own model, which has its name."""

    server: TritonServer
    model: Path

    def control(self, verb: str) -> None:
        """Load or unload the model."""
        change = {"load": load, "unload": unload}[verb]
        status, reason = change(self.server, self.model.name)
        assert status == 200, reason

    def ask(self) -> None:
        """Have the model generate some tokens."""
        request = {**LONG, "max_tokens": TOKENS}
        assert not ask(self.server, PROMPT, request, options={"model": self.model.name}).error

    def tokens(self) -> float:
        """Return how many generated tokens the server's metrics count for the model."""
        page = read_metrics(f"http://127.0.0.1:{self.server.ports.metrics}/metrics")
        found = [value for name, labels, value in page.samples if name == COUNTED and labels["model"] == self.model.name]
        return sum(found)


@pytest.fixture(scope="module")
def waiting(light_serving: Serve, light_long_arguments: dict[str, object]) -> Iterator[TritonServer]:
    """A server of this module with no model loaded."""
    arguments = ("--model-control-mode=explicit",)
    with light_serving(light_long_arguments, environment=ONE_THREAD, arguments=arguments) as server:
        yield server


@pytest.fixture
def explicit(waiting: TritonServer) -> Iterator[Explicit]:
    """That server, with a model of the test's own: its metrics may stay after an unload, and count on."""
    used = len(list(waiting.repository.iterdir()))
    here = Explicit(waiting, waiting.repository / f"vllm_{used}")
    shutil.copytree(waiting.repository / "vllm", here.model)
    yield here
    here.control("unload")
    wait_for(lambda: not stubs(waiting))


def test_a_loaded_model_is_not_loaded_again(explicit: Explicit) -> None:
    """`load` of a loaded model finds nothing new: the same processes go on.

    Triton looks at ctimes, too: a file of the folder that gets or loses a hard link somewhere else makes it load once more.
    """
    before = files(explicit.model)
    begin = explicit.server.log.stat().st_size
    explicit.control("load")
    _check_that_a_load_changes_nothing(explicit.server, explicit.model, before, lambda: explicit.control("load"), begin)


def test_a_poll_finds_nothing_new(light_serving: Serve) -> None:
    """The poll of the folder of a model that nobody changed: the same processes go on."""
    before: dict[str, float] = {}
    arguments = ("--model-control-mode=poll", "--repository-poll-secs=1")
    with light_serving(environment=ONE_THREAD, arguments=arguments, prepare=lambda model: before.update(files(model))) as server:
        model = server.repository / "vllm"
        _check_that_a_load_changes_nothing(server, model, before, lambda: pause(POLLS), server._log_start)


def _check_that_a_load_changes_nothing(
    server: TritonServer, model: Path, before: dict[str, float], load: Callable[[], object], begin: int = 0
) -> None:
    """See that the loaded model is loaded once; its log begins at byte ``begin``."""
    running = stubs(server)
    assert len(running) == 1
    assert written(model, before) == []
    load()
    assert ask(server, PROMPT, {"temperature": 0}, options={"model": model.name}).text == PROMPT + ANSWER
    wait_for(lambda: "ready after" in _said(server, begin), "'ready after' in the server's log")
    said = _said(server, begin)
    loads = said.count("starting the engine and loading the model") - said.count("still starting the engine")
    assert 1 <= loads <= 1 + said.count(GIVEN_UP), said[-6000:]  # Triton gives up a load if the machine stands still
    assert said.count("ready after") == 1
    assert stubs(server) == running, said[-6000:]
    assert written(model, before) == []


def test_vllm_writes_nothing_into_the_models_folder(server: TritonServer) -> None:
    """Nor do its processes, which import the adapter's worker from there: the next `load` would load the model again."""
    assert ask(server, PROMPT, {"temperature": 0}).text == PROMPT + ANSWER
    model = server.repository / "vllm"
    assert [path.name for path in model.rglob("__pycache__")] == []
    assert max(files(model).values()) <= server._started


@pytest.mark.parametrize("counts", [(1, 1), pytest.param((1, 2), marks=pytest.mark.slow)], ids=("1-1", "1-2"))
def test_metrics_go_on_after_a_reload(explicit: Explicit, counts: tuple[int, int]) -> None:
    """Triton loads the new instances before it unloads the old ones, and has a metric of both but once."""
    before, after = counts
    server, model = explicit.server, explicit.model
    with_metrics(model)
    with_parameter(model, "UNLOAD_GRACE_SECONDS", "600")
    with_instances(model, before)
    explicit.control("load")
    with OpenStream(server.grpc_url, prompt(PROMPT, LONG, stream=True), model=model.name) as running:
        running.wait(1)
        old = stubs(server)
        with_instances(model, after)
        with_parameter(model, "UNLOAD_GRACE_SECONDS", "3")
        explicit.control("load")
        explicit.ask()  # of the new ones, while the old ones have a request
        assert stubs(server) > old
        running.cancel()
        running.wait_end(PATIENCE)
    wait_for(lambda: not stubs(server) & old)
    wait_for(lambda: explicit.tokens() >= TOKENS)
    begun = explicit.tokens()
    assert begun == TOKENS
    for number in range(1, 11):
        explicit.ask()
        wait_for(lambda number=number: explicit.tokens() >= begun + number * TOKENS)
    explicit.control("unload")
    wait_for(lambda: not stubs(server))
    assert server.running


def test_a_reload_with_more_instances_is_one_of_its_own(explicit: Explicit) -> None:
    """Its third instance does not find the load of two that still serves; a count that alone is changed is no reload."""
    server, model = explicit.server, explicit.model
    with_instances(model, 2)
    explicit.control("load")
    old = stubs(server)
    with_instances(model, 3)
    with_parameter(model, "UNLOAD_GRACE_SECONDS", "3")
    explicit.control("load")
    wait_for(lambda: not stubs(server) & old)
    assert len(stubs(server)) == 3
    explicit.ask()


def test_metrics_of_a_killed_instance_are_those_of_the_next(explicit: Explicit) -> None:
    """Nobody takes them away, so the next one counts on; they leave with it."""
    server = explicit.server
    with_metrics(explicit.model)
    explicit.control("load")
    explicit.ask()
    wait_for(lambda: explicit.tokens() == TOKENS)
    killed = stubs(server)
    for stub in killed:
        kill_at_rest(stub.pid)
    wait_for(lambda: not [p for p in server.members() if p in killed or name_of(p).startswith("VLLM::")])
    explicit.control("unload")
    explicit.control("load")
    explicit.ask()
    wait_for(lambda: explicit.tokens() == 2 * TOKENS)
    explicit.control("unload")
    wait_for(lambda: not explicit.tokens())
    assert server.running


def test_the_folder_of_a_killed_instance_goes_with_the_next_load(explicit: Explicit) -> None:
    """An unload removes the folder of its own instance only."""
    server = explicit.server
    explicit.control("load")
    (left,) = run_folders(server)
    for stub in (killed := stubs(server)):
        kill_at_rest(stub.pid)
    wait_for(lambda: not [p for p in server.members() if p in killed or name_of(p).startswith("VLLM::")])
    explicit.control("unload")
    assert run_folders(server) == [left]
    explicit.control("load")
    (own,) = run_folders(server)
    assert own != left
    explicit.control("unload")
    wait_for(lambda: run_folders(server) == [])


def test_vllms_sockets_are_in_the_runs_own_folder(server: TritonServer) -> None:
    """vLLM removes none of them. Shared memory that would stay after a kill is named there."""
    (own,) = run_folders(server)
    assert [path for path in own.iterdir() if path.is_socket()]
    assert [path for path in own.parent.iterdir() if path.is_socket()] == []
    assert json.loads((own / "memory").read_text())["names"]


def run_folders(server: TritonServer) -> list[Path]:
    """Return the folders for the sockets of a server's models."""
    assert server._scratch
    return list(server._scratch.glob("vllm_env_run_*"))


def _said(server: TritonServer, begin: int) -> str:
    return server.log.read_bytes()[begin:].decode(errors="replace")
