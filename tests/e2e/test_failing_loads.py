"""Loads that fail: Triton says why, and no process is left. One server without a model is asked for all of them."""

from __future__ import annotations

import json
import re
import shutil
import socket
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from support.instances import said
from support.model_control import load
from support.patience import wait_for
from support.reference import ONE_THREAD
from support.serving import EXPLICIT, in_small_place, serve
from support.settings import with_parameter
from support.sightings import Sightings
from support.triton_client import get

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from support.serving import Parts, Serve
    from vllm_env.serve.server import TritonServer

pytestmark = pytest.mark.e2e


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


def test_a_load_that_fails_in_the_engines_process_tells_why(idle: TritonServer) -> None:
    """AsyncLLM itself only refers to what was logged before."""
    reason = refused(idle, "blocks", with_arguments(num_gpu_blocks_override=1))
    assert "vLLM did not start with the arguments of vllm_engine_args.json" in reason
    assert "ValueError: " in reason
    assert "root cause" not in reason


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
