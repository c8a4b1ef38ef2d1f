"""Loads that fail: Triton says why, and no process is left. One server without a model is asked for all of them."""

from __future__ import annotations

import json
import re
import shutil
import socket
import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from support.instances import said
from support.model_control import NOTICED, PAUSE_SECONDS, TOLERATED_SINCE, load, unload
from support.patience import pause, wait_for
from support.reference import ONE_THREAD
from support.repositories import serves_since
from support.server_processes import stubs
from support.serving import EXPLICIT, in_small_place, is_cuda, serve
from support.settings import with_parameter
from support.sightings import Sightings
from support.triton_client import get
from vllm_env.serve.server import free_ports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from support.serving import Parts, Serve
    from vllm_env.serve.server import TritonServer

pytestmark = pytest.mark.e2e
TRIES = 3


@pytest.fixture(scope="module")
def cache(session_folder: Path) -> dict[str, str]:
    """The variable with vLLM's cache, a folder of this server's own."""
    return {"VLLM_CACHE_ROOT": str(session_folder / "failing_loads")}


@pytest.fixture(scope="module")
def idle(serving: Serve, cache: dict[str, str]) -> Iterator[TritonServer]:
    """A server that has loaded nothing."""
    with serving(environment={**ONE_THREAD, **cache}, arguments=(EXPLICIT,)) as running:
        yield running


@pytest.fixture(autouse=True)
def _idle_again(idle: TritonServer) -> Iterator[None]:
    """After each failed load the server lives and has no other process."""
    yield
    wait_for(lambda: [process.pid for process in idle.members()] == [idle.pid], "the end of the failed load's processes")
    assert get(idle.http_url, "/v2/health/live")[0] == 200


def refused(server: TritonServer, name: str, change: Callable[[Path], None]) -> str:
    """Load a changed copy of the model, which must fail; return the reason that Triton answers."""
    model = server.repository / name
    shutil.copytree(server.repository / "vllm", model)
    change(model)
    start = len(said(server))
    status, body = load(server, name)
    assert status == 400, body
    reason = str(json.loads(body)["error"])
    assert f"load failed for model '{name}'" in reason, said(server)[start:][-4000:]
    assert f"failed to load '{name}'" in said(server)[start:]
    return reason


def with_arguments(**more: Any) -> Callable[[Path], None]:
    """Return a function that adds engine arguments to a model."""

    def change(model: Path) -> None:
        file = model / "vllm_engine_args.json"
        file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **more}), encoding="utf-8")

    return change


def with_openai(port: int, **more: str) -> Callable[[Path], None]:
    """Return a function that lets a model serve vLLM's OpenAI API, too."""

    def change(model: Path) -> None:
        for name, value in {"OPENAI_PORT": str(port), **more}.items():
            with_parameter(model, name, value)

    return change


def test_a_load_that_fails_tells_why_and_starts_no_process_to_look_at_the_model(
    idle: TritonServer, cache: dict[str, str]
) -> None:
    """With a cache that is still empty, as at a first start."""
    shutil.rmtree(cache["VLLM_CACHE_ROOT"], ignore_errors=True)
    seen = Sightings(cache, "long")
    start = len(said(idle))
    with seen.watching():
        reason = refused(idle, "long", with_arguments(max_model_len=10**9))
    assert "max_model_len (1000000000) is greater" in reason
    (frames,) = [line for line in said(idle)[start:].splitlines() if "[long] Traceback" in line]
    assert "arg_utils.py" in frames
    assert "is greater" not in frames  # Triton logs the reason itself
    assert seen.seen
    assert seen.inspections() == []


def test_a_port_that_cannot_be_had_ends_the_load(idle: TritonServer) -> None:
    """Before vLLM is imported: one that is taken, one that other machines could reach without a key, and Triton's own."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        start = len(said(idle))
        assert f"OPENAI_PORT: port {port} of 127.0.0.1 is taken" in refused(idle, "taken_port", with_openai(port))
        assert "VLLM_API_KEY" in refused(idle, "open_port", with_openai(port, OPENAI_HOST="0.0.0.0"))
    tritons = urlsplit(idle.http_url).port or 0
    assert f"OPENAI_PORT: {tritons} is the port of Triton's http endpoint" in refused(idle, "its_port", with_openai(tritons))
    assert "importing vLLM" not in said(idle)[start:]


@pytest.mark.slow
def test_a_load_that_is_given_up_while_the_port_opens_ends(idle: TritonServer) -> None:
    """Server and stub waited for each other for ever; test_model_paused_start.py has the pause before that."""
    if serves_since(TOLERATED_SINCE):
        pytest.skip("this Triton waits for a stub that is paused for so long")
    model = idle.repository / "paused"
    shutil.copytree(idle.repository / "vllm", model)
    with_openai(free_ports().http)(model)
    paused: list[bool] = []

    def stop(start: int) -> None:
        wait_for(lambda: "[paused] ready after" in said(idle, start), "the engine", longest_pause=0.01)
        (stub,) = stubs(idle)
        stub.suspend()
        paused.append("listens on port" not in said(idle, start))
        pause(PAUSE_SECONDS)
        stub.resume()

    # On a busy machine the pause may come when the port is open already; then once more.
    for _ in range(TRIES):
        start = len(said(idle))
        stopping = threading.Thread(target=stop, args=(start,))
        stopping.start()
        status, told = load(idle, "paused")
        stopping.join()
        assert status == 200, told
        assert unload(idle, "paused")[0] == 200
        if paused[-1]:
            break
    assert paused[-1]
    assert NOTICED in said(idle, start)


@pytest.mark.slow  # test_arguments.py has the rule, and a port that is taken comes out in the same way
def test_a_wrong_argument_of_the_openai_server_ends_the_load(idle: TritonServer) -> None:
    """Before the engine starts."""

    def change(model: Path) -> None:
        with_openai(free_ports().http)(model)
        (model / "vllm_openai_args.json").write_text('{"chat_template": "template.jinja"}')

    start = len(said(idle))
    assert "vllm_openai_args.json: chat_template differs from vllm_engine_args.json" in refused(idle, "two_templates", change)
    assert "starting the engine" not in said(idle)[start:]


@pytest.mark.slow  # as an engine that fails does below
def test_a_load_that_vllm_cannot_do_tells_why(idle: TritonServer, parts: Parts) -> None:
    """vLLM finds out in EngineCore that it has no Ray workers on a CPU; Triton's reason for the failed load says it too."""
    if is_cuda(parts.environment):
        pytest.skip("a CUDA build gets further with Ray")
    reason = refused(idle, "ray", with_arguments(distributed_executor_backend="ray"))
    assert "distributed_executor_backend: vLLM" in reason
    assert "does not support ray" in reason


def test_a_load_that_fails_in_the_engines_process_tells_why(idle: TritonServer) -> None:
    """AsyncLLM itself only refers to what was logged before."""
    reason = refused(idle, "blocks", with_arguments(num_gpu_blocks_override=1))
    assert "vLLM did not start with the arguments of vllm_engine_args.json" in reason
    assert "ValueError: " in reason
    assert "root cause" not in reason


@pytest.mark.slow  # test_parsers.py has the rule
def test_an_unknown_parser_is_refused_when_the_model_is_loaded(idle: TritonServer) -> None:
    """Triton's reason has the names that vLLM knows."""
    reason = refused(idle, "parser", with_arguments(tool_parser="herms"))
    assert "tool_parser: vLLM has no parser 'herms', did you mean 'hermes'?; it has " in reason


def test_two_files_of_arguments_that_differ_are_refused_by_the_server(idle: TritonServer) -> None:
    """Before anything is imported, with both names; the same content in both is served (test_adopt.py has one)."""

    def with_another(model: Path) -> None:
        shutil.copy(model / "vllm_engine_args.json", model / "1" / "model.json")
        with_arguments(max_model_len=64)(model)

    said = r"vllm_engine_args\.json and 1/model\.json both hold engine arguments and differ \(max_model_len\)"
    assert re.search(said, refused(idle, "files", with_another))


def test_a_broken_model_py_is_noticed(idle: TritonServer) -> None:
    """What it raises is Triton's reason."""

    def spoil(model: Path) -> None:
        (model / "1" / "model.py").write_text("raise RuntimeError('broken')\n", encoding="utf-8")

    assert "RuntimeError: broken" in refused(idle, "broken", spoil)


@pytest.mark.slow
def test_a_load_for_which_shared_memory_is_too_small_says_so(parts: Parts, tmp_path: Path) -> None:
    """Its reason names the file system and the option that makes it larger; 2 MB are enough for this model."""
    small = in_small_place(parts, "/dev/shm", tmp_path, "1m")
    with serve(small, environment=ONE_THREAD, arguments=(EXPLICIT,)) as server:
        status, body = load(server)
    assert status == 400, body
    reason = str(json.loads(body)["error"])
    assert "No space left on device; /dev/shm has" in reason
    assert "--shm-size" in reason
